"""How much there is to a JSON text before anybody reads it: decoding holds the interpreter until it is done.

A text of 8 MiB is read in 3 to 5 ms if it is mostly one string, as long prompts are (15 ms if all of it is escaped).
Made of the smallest values it takes half a second, in which nothing else happens in the whole process. Nobody needs
that: 100,000 strings, lists and objects are 20,000 messages (20 ms at worst), and a million numbers are four of the
longest prompts as ids (30 ms).
"""

from common.errors import InvalidRequest

MAX_PARTS = 100_000
"""Strings, lists and objects."""

MAX_NUMBERS = 1_000_000
"""Numbers, or whatever else stands between commas."""

PIECE = 1 << 16
"""Bytes that are looked at without giving way to other threads."""

_QUOTE, _BACKSLASH = b'"', ord("\\")


def check_weight(body: bytes) -> None:
    """Raise `InvalidRequest` if `body` has too many values. It may have fewer than are counted, never more; what is no
    JSON is not noticed here."""
    place = num_parts = num_numbers = 0
    while place < len(body):
        quote = body.find(_QUOTE, place)
        end = len(body) if quote < 0 else quote
        for start in range(place, end, PIECE):
            stop = min(start + PIECE, end)
            num_parts += body.count(b"[", start, stop) + body.count(b"{", start, stop)
            num_numbers += body.count(b",", start, stop)
            _check(num_parts, num_numbers)
        num_parts += 1
        place = _behind_string(body, end + 1)
    _check(num_parts, num_numbers)


def _check(num_parts: int, num_numbers: int) -> None:
    if num_parts > MAX_PARTS or num_numbers > MAX_NUMBERS:
        raise InvalidRequest(
            f"The body holds more than {MAX_PARTS} texts, lists and objects, or more than {MAX_NUMBERS} values.",
            code="too_many_values",
        )


def _behind_string(body: bytes, place: int) -> int:
    """Return the place behind the string that begins at `place`."""
    while (quote := body.find(_QUOTE, place)) >= 0:
        first = quote
        while first > place and body[first - 1] == _BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            return quote + 1
        place = quote + 1
    return len(body)
