"""From the text of a flag or an environment variable to a value. A reader raises `ValueError` with the reason."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ValueT = TypeVar("ValueT")

AUTO = "auto"
"""How a user spells "decide for me"; the value is None."""

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?)\s*(?P<unit>[kmgt]i?b?|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def text(raw: str) -> str:
    """Return the text as it is."""
    return raw


def path(raw: str) -> Path:
    """Return a path; `~` is the home directory."""
    return Path(raw).expanduser()


def boolean(raw: str) -> bool:
    """Return the truth of 1/true/yes/on or 0/false/no/off."""
    lowered = raw.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("must be true or false")


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers from `minimum` to `maximum`."""

    def read(raw: str) -> int:
        try:
            value = int(raw)
        except ValueError:
            raise ValueError("must be a whole number") from None
        _check_range(value, minimum, maximum)
        return value

    return read


def number(minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    """Return a reader of finite numbers from `minimum` to `maximum`."""

    def read(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            raise ValueError("must be a number") from None
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        _check_range(value, minimum, maximum)
        return value

    return read


def power_of_two(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a reader of powers of two from `minimum` to `maximum`."""
    read_integer = integer(minimum, maximum)

    def read(raw: str) -> int:
        value = read_integer(raw)
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    return read


def size_bytes(raw: str) -> int:
    """Return a size in bytes: "512MiB", "2GiB" (powers of 1024), "500MB" (of 1000), "4G" (of 1024) or plain bytes."""
    match = _SIZE.fullmatch(raw.strip())
    if match is None:
        raise ValueError("must be a size like 512MiB or 2GiB")
    unit = (match["unit"] or "b").lower()
    is_decimal = len(unit) == 2 and unit.endswith("b")
    size = float(match["number"]) * (1000 if is_decimal else 1024) ** _POWERS.get(unit[0], 0)
    if size < 1:
        raise ValueError("must be more than nothing")
    return int(size)


def core_list(raw: str) -> tuple[int, ...]:
    """Return the cores of a list like "0", "0-3" or "0,2-5", ascending."""
    cores: set[int] = set()
    for part in raw.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError("must be a list of cores like 0 or 0-3 or 0,2-5")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(cores))


def descriptors(raw: str) -> tuple[int, ...]:
    """Return the file descriptors of a list like "3" or "3,4"."""
    parts = [part.strip() for part in raw.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", part) for part in parts):
        raise ValueError("must be a list of file descriptors like 3 or 3,4")
    return tuple(int(part) for part in parts)


def auto(read: Callable[[str], ValueT]) -> Callable[[str], ValueT | None]:
    """Return a reader that takes the word "auto" for None and leaves the rest to `read`."""

    def read_or_none(raw: str) -> ValueT | None:
        return None if raw.strip().lower() == AUTO else read(raw)

    return read_or_none


port_number = integer(0, 65535)

NO_CORES: tuple[int, ...] = ()
NO_DESCRIPTORS: tuple[int, ...] = ()


def _check_range(value: float, minimum: float, maximum: float | None) -> None:
    if value < minimum:
        raise ValueError(f"must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"must be at most {maximum}")
