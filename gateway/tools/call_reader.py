"""Reads one call while it is written: `{"name": "...", "arguments": {...}}`, the keys in any order.

A call is certain once its name is known, is one of the offered ones, and its arguments begin (or the object ends
without any). Until then the text may turn out to be something else.
"""

import enum
from collections.abc import Collection

import msgspec

from gateway.markers import WHITESPACE
from gateway.tools.json_scanner import JsonScanner

NO_ARGUMENTS = "{}"
"""What a client reads if the model wrote no arguments."""

_NAME = "name"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {_NAME, "id", "type"}
"""An object with any other key is no call, so that an answer that is an object of its own is not held back for long."""


class _At(enum.Enum):
    """What comes next."""

    OPENING_BRACE = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA = enum.auto()
    END = enum.auto()
    NOWHERE = enum.auto()


class CallReader:
    """Reads one call of one of the functions called `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._at = _At.OPENING_BRACE
        self._scanner = JsonScanner()
        self._written = ""  # the key or value being read
        self._key = ""
        self._name: str | None = None
        self._arguments = ""
        self._has_arguments = False

    @property
    def name(self) -> str | None:
        """The function, once the call is certain."""
        is_certain = self._has_arguments or self._at is _At.END
        return self._name if is_certain else None

    @property
    def is_complete(self) -> bool:
        """Whether the call has ended."""
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""
        return self._at is _At.NOWHERE

    def push(self, text: str) -> int:
        """Read on; return how many characters belong to the call: all of them unless it ends or breaks."""
        at = 0
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._at in (_At.IN_KEY, _At.IN_VALUE):
                at = self._scan(text, at)
            elif text[at] in WHITESPACE:
                at += 1
            else:
                at = self._punctuation(text, at)
        return at

    def take_arguments(self) -> str:
        """Return what has been added to the arguments' text since the last time."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _punctuation(self, text: str, at: int) -> int:
        match self._at, text[at]:
            case (_At.OPENING_BRACE, "{") | (_At.COMMA, ","):
                self._at = _At.KEY
            case (_At.KEY | _At.COMMA, "}"):
                self._end()
            case (_At.COLON, ":"):
                self._at = _At.VALUE
            case (_At.KEY, '"'):
                return self._begin(_At.IN_KEY, at)
            case (_At.VALUE, char) if char not in ",:}]":
                return self._begin_value(char, at)
            case _:
                self._break()
                return at
        return at + 1

    def _begin(self, where: _At, at: int) -> int:
        self._at, self._scanner, self._written = where, JsonScanner(), ""
        return at

    def _begin_value(self, first: str, at: int) -> int:
        if self._key in _ARGUMENTS and self._has_arguments:
            self._key = ""  # only the first ones count
        self._has_arguments = self._has_arguments or (self._key in _ARGUMENTS and first in "{[")
        return self._begin(_At.IN_VALUE, at)

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.push(text, at)
        self._keep(text[at:end])
        if self._scanner.is_complete:
            self._value_read() if self._at is _At.IN_VALUE else self._key_read()
        return end

    def _keep(self, text: str) -> None:
        is_streamed = self._at is _At.IN_VALUE and self._key in _ARGUMENTS and self._has_arguments
        if is_streamed:
            self._arguments += text
        else:
            self._written += text

    def _key_read(self) -> None:
        key = _text_of(self._written)
        if key is None or key not in _KEYS:
            self._break()
            return
        self._key, self._at = key, _At.COLON

    def _value_read(self) -> None:
        self._at = _At.COMMA
        if self._key == _NAME and self._name is None:
            self._name_read(_text_of(self._written))
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._arguments = _arguments_of(self._written)

    def _name_read(self, name: str | None) -> None:
        if name in self._names:
            self._name = name
        else:
            self._break()

    def _end(self) -> None:
        if self._name is None:
            self._break()
            return
        if not self._has_arguments:
            self._arguments = NO_ARGUMENTS
        self._at = _At.END

    def _break(self) -> None:
        """What is certain stays a call that ends here; else there was none."""
        self._at = _At.END if self.name is not None else _At.NOWHERE


def _text_of(written: str) -> str | None:
    """Return the text that a JSON string stands for, None if it is none."""
    try:
        return msgspec.json.decode(written, type=str)
    except msgspec.DecodeError:
        return None


def _arguments_of(written: str) -> str:
    """Return the arguments that are not written as an object: nothing, JSON inside of a string, or what it is."""
    if written in ("null", '""'):
        return NO_ARGUMENTS
    text = _text_of(written)
    return written if text is None else text
