"""`/health/*`."""

import msgspec


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a probe reads."""

    status: str
    reason: str = ""
