"""One thing that was looked at."""

import enum

import msgspec


class Verdict(enum.StrEnum):
    """Whether it is there, and whether that matters."""

    OK = "ok"
    OPTIONAL = "optional"
    """Missing, and something that needs it will not work or be slower."""
    MISSING = "missing"
    """Missing, and `tandem up` cannot work."""


class Finding(msgspec.Struct, frozen=True):
    """What was found under `name`; `advice` tells what to do if it is missing, and for what."""

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""


def found(name: str, value: str | None, advice: str, *, is_required: bool = False) -> Finding:
    """Return a finding that is fine if there is a value."""
    if value:
        return Finding(name, value)
    return Finding(name, "none", Verdict.MISSING if is_required else Verdict.OPTIONAL, advice)
