"""`/version`."""

import msgspec


class Version(msgspec.Struct, frozen=True):
    """Which Tandem this is."""

    version: str
