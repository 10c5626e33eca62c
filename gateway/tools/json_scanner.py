"""Follows one JSON value through text that arrives in pieces, only to find its end.

What stands between the brackets is not checked: a model may write broken JSON, and its client is told what it wrote.
"""

import re

_OUTSIDE = re.compile(r'[^"{}\[\]]+')
_INSIDE = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,{}\[\]:\"]+")


class JsonScanner:
    """Takes the characters of one value; starts at its first one, which is not whitespace."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False
        self.is_complete = False
        """Whether the value has ended. A number or word ends where something else begins, which is not taken."""

    def push(self, text: str, at: int) -> int:
        """Read on at `at`; return where the taken characters end: at the end of `text` unless the value ends before.

        Takes nothing at all if no value can begin there.
        """
        while at < len(text) and not self.is_complete:
            if self._is_in_string:
                at = self._in_string(text, at)
            elif self._is_scalar or (self._depth == 0 and text[at] not in '"{['):
                at = self._in_scalar(text, at)
            else:
                at = self._outside(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        match text[at]:
            case "\\":
                self._is_escaped = True
            case '"':
                self._is_in_string = False
                self.is_complete = self._depth == 0
            case _:
                return _end(_INSIDE, text, at)
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        self._is_scalar = True
        end = _end(_SCALAR, text, at)
        self.is_complete = end < len(text)
        return end

    def _outside(self, text: str, at: int) -> int:
        match text[at]:
            case '"':
                self._is_in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_complete = self._depth == 0
            case _:
                return _end(_OUTSIDE, text, at)
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
