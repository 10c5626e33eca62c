"""Markers in a text that arrives in pieces: what certainly stands before one, and what may still become one.

White space beside a marker belongs to it, so white space at the end of a text is held back until something follows.
"""

WHITESPACE = " \t\n\r"

MAX_SPACE = 64
"""So many characters of it do: models that are lost write nothing else, and it is looked at again with every token."""


def skip_space(text: str) -> int:
    """Return where the first character that is no white space stands."""
    return len(text) - len(text.lstrip(WHITESPACE))


def before_marker(text: str, marker: str) -> tuple[str, int | None]:
    """Return what certainly stands before `marker`, and where the marker ends (None: it is not, or not all, there)."""
    found = text.find(marker) if marker else -1
    if found >= 0:
        return _without_space(text[:found]), found + len(marker)
    return _without_space(text[: len(text) - num_begun(text, marker)]), None


def _without_space(text: str) -> str:
    """Return the text without the white space at its end."""
    return text[: max(len(text.rstrip(WHITESPACE)), len(text) - MAX_SPACE)]


def num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)
