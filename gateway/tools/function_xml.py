"""Reads one call in the manner of Qwen3-Coder while it is written:

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A call is certain once its function is one of the offered ones and the first parameter, or the end, follows. A value is
plain text; what it is in JSON is told by the function's schema. Text is passed on while it is written, all else when it
has ended.
"""

import enum
import json
from collections.abc import Mapping

from gateway.markers import WHITESPACE, num_begun
from gateway.schemas.tools import FunctionDefinition
from gateway.tools.argument_types import TEXT, argument_of, types_of_parameter

HEAD = "<function="
_PARAMETER = "<parameter="
_END_OF_PARAMETER = "</parameter>"
_END = "</function>"
_VALUE_ENDS = ("\n" + _END_OF_PARAMETER, _END_OF_PARAMETER)
"""One end of line at both edges of a value belongs to its frame."""


class _At(enum.Enum):
    """What comes next."""

    HEAD = enum.auto()
    NAME = enum.auto()
    TAG = enum.auto()
    """White space, a parameter, or the end."""
    KEY = enum.auto()
    VALUE = enum.auto()
    END = enum.auto()
    NOWHERE = enum.auto()


class FunctionXmlReader:
    """Reads one call of one of `functions`, which are known by their names. See `call_parser.Reader`."""

    def __init__(self, functions: Mapping[str, FunctionDefinition]) -> None:
        self._functions = functions
        self._at = _At.HEAD
        self._tag = ""  # what has been read of a tag, or of the name in it
        self._function: FunctionDefinition | None = None
        self._is_certain = False
        self._keys: set[str] = set()
        self._value = _Value("", TEXT)
        self._arguments = ""

    @property
    def name(self) -> str | None:
        """The function, once the call is certain."""
        return self._function.name if self._is_certain and self._function is not None else None

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
            match self._at:
                case _At.HEAD | _At.TAG:
                    at = self._in_tag(text, at)
                case _At.NAME | _At.KEY:
                    at = self._in_name(text, at)
                case _:
                    at = self._in_value(text, at)
        return at

    def take_arguments(self) -> str:
        """Return what has been added to the arguments' text since the last time."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _in_tag(self, text: str, at: int) -> int:
        if not self._tag and self._at is _At.TAG and text[at] in WHITESPACE:
            return at + 1
        tag = self._tag + text[at]
        tags = (HEAD,) if self._at is _At.HEAD else (_PARAMETER, _END)
        if not any(known.startswith(tag) for known in tags):
            self._break()
            return at
        self._tag = tag
        if tag in tags:
            self._tag_read(tag)
        return at + 1

    def _tag_read(self, tag: str) -> None:
        self._tag = ""
        if tag == HEAD:
            self._at = _At.NAME
            return
        self._is_certain = True
        if tag == _PARAMETER:
            self._at = _At.KEY
            return
        self._arguments += "}" if self._keys else "{}"
        self._at = _At.END

    def _in_name(self, text: str, at: int) -> int:
        if text[at] in "<\n":
            self._break()
            return at
        if text[at] != ">":
            self._tag += text[at]
            return at + 1
        name, self._tag = self._tag, ""
        if self._at is _At.NAME:
            self._name_read(name)
        else:
            self._key_read(name)
        return at + 1

    def _name_read(self, name: str) -> None:
        self._function = self._functions.get(name)
        self._at = _At.NOWHERE if self._function is None else _At.TAG

    def _key_read(self, key: str) -> None:
        assert self._function is not None
        is_new = key not in self._keys  # only the first value of a key counts
        self._value = _Value(key, types_of_parameter(self._function, key), is_told=is_new, is_first=not self._keys)
        self._keys.add(key)
        self._at = _At.VALUE

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._arguments += self._value.take()
        if self._value.is_complete:
            self._at = _At.TAG
        return end

    def _break(self) -> None:
        """What is certain stays a call that ends here, with whole arguments; else there was none."""
        if not self._is_certain:
            self._at = _At.NOWHERE
            return
        self._arguments += "}" if self._keys else "{}"
        self._at = _At.END


class _Value:
    """One value, which belongs to `types` (see `argument_types`). One that is not told is read and forgotten."""

    def __init__(self, key: str, types: frozenset[str], *, is_told: bool = True, is_first: bool = True) -> None:
        self._types = types
        self._is_told = is_told
        self._has_begun = False  # the end of line that may stand before it has been passed
        self._pending = ""  # may belong to the end
        self._written: list[str] = []
        self._told = f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: " if is_told else ""
        if is_told and types == TEXT:
            self._told += '"'
        self.is_complete = False

    def push(self, text: str, at: int) -> int:
        """Read on at `at`; return where its characters end, those of the tag behind it included."""
        if not self._has_begun:
            self._has_begun = True
            at += text[at] == "\n"
        pending = self._pending + text[at:]
        end = pending.find(_END_OF_PARAMETER)
        if end < 0:
            num_kept = max(num_begun(pending, tag) for tag in _VALUE_ENDS)
            self._pending = pending[len(pending) - num_kept :]
            self._add(pending[: len(pending) - num_kept])
            return len(text)
        self._add(pending[:end].removesuffix("\n"))
        self._finish()
        return len(text) - (len(pending) - end - len(_END_OF_PARAMETER))

    def take(self) -> str:
        """Return what has been added to its JSON since the last time."""
        told, self._told = self._told, ""
        return told

    def _add(self, text: str) -> None:
        if not self._is_told:
            return
        if self._types == TEXT:
            self._told += json.dumps(text, ensure_ascii=False)[1:-1]
        else:
            self._written.append(text)

    def _finish(self) -> None:
        self.is_complete = True
        if self._is_told:
            self._told += '"' if self._types == TEXT else argument_of("".join(self._written), self._types)
