"""Markers in a text that arrives in pieces: what certainly stands before one, and what may still become one.

White space beside a marker belongs to it, so white space at the end of a text is held back until something follows.
"""

WHITESPACE = " \t\n\r"


def skip_space(text: str) -> int:
    """Return where the first character that is no white space stands."""
    return len(text) - len(text.lstrip(WHITESPACE))


def before_marker(text: str, marker: str) -> tuple[str, int | None]:
    """Return what certainly stands before `marker`, and where the marker ends (None: it is not, or not all, there)."""
    found = text.find(marker) if marker else -1
    if found >= 0:
        return text[:found].rstrip(WHITESPACE), found + len(marker)
    return text[: len(text) - _num_begun(text, marker)].rstrip(WHITESPACE), None


def _num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)
