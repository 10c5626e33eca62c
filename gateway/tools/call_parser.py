"""Reads content and calls out of an answer's text, wherever it is cut.

Only a call of an offered function is a call. Everything else comes out as content, exactly as it was written, but for
white space beside calls.
"""

import enum
from collections.abc import Callable
from typing import Protocol

from gateway.answer_parser import Content, Piece, ToolCallDelta
from gateway.markers import MAX_SPACE, before_marker, skip_space
from gateway.tools.framing import Framing, FunctionXml
from gateway.tools.function_xml import HEAD

MAX_DOUBT = 1024
"""Characters within which the function of a call must be known: models write it first. Without a bound an answer
of beginnings of calls would be read again from each of them: 28 KB took 13 s."""


class _In(enum.Enum):
    """Where in the answer the next character stands."""

    START = enum.auto()
    TEXT = enum.auto()
    OPENED = enum.auto()
    CALL = enum.auto()
    BEHIND_CALL = enum.auto()
    OVER = enum.auto()


class Reader(Protocol):
    """Reads one call of an offered function from its first character on."""

    @property
    def name(self) -> str | None:
        """The function, once the call is certain."""

    @property
    def is_complete(self) -> bool:
        """Whether the call has ended."""

    @property
    def is_broken(self) -> bool:
        """Whether the text is not a call."""

    def push(self, text: str) -> int:
        """Read on; return how many characters belong to the call: all of them unless it ends or breaks."""

    def take_arguments(self) -> str:
        """Return what has been added to the arguments' JSON since the last time."""


class CallParser:
    """Reads one answer. `make_reader` reads a call, `make_id` names it; behind call number `max_calls` (None: any)
    nothing is read.
    """

    def __init__(
        self,
        framing: Framing | FunctionXml,
        make_reader: Callable[[], Reader],
        make_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        # What stands around calls in XML is an opener and a closer, as in the simplest of the other families.
        self._framing = Framing(framing.opener, framing.closer) if isinstance(framing, FunctionXml) else framing
        self._head = HEAD if isinstance(framing, FunctionXml) else ""
        """What a call may begin with anywhere, without any opener."""
        self._first = self._head[:1] or "{"
        self._make_reader = make_reader
        self._make_id = make_id
        self._max_calls = max_calls
        self._in = _In.START
        self._text = ""  # not read yet
        self._attempt = ""  # what has been read since a call may have begun: content if none did
        self._reader = make_reader()
        self._is_listing = False
        self._is_call_told = False
        self._pieces: list[Piece] = []
        self.num_calls = 0
        """Calls that the client has been told of."""

    @property
    def is_over(self) -> bool:
        """Whether the last call that is wanted has been read."""
        return self._in is _In.OVER

    def push(self, text: str) -> list[Piece]:
        """Return what the text adds for certain."""
        self._text += text
        while self._text and self._step():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """Return what was held back and did not become a call; the cut-off beginning of a further call is dropped."""
        match self._in:
            case _In.START | _In.TEXT:
                self._tell(self._text)
            case _In.OPENED | _In.CALL if self.num_calls == 0:
                self._tell(self._attempt + self._text)
        return self._take()

    def _step(self) -> bool:
        """Read on; return whether something was decided, so that there may be more to read."""
        match self._in:
            case _In.START:
                return self._start()
            case _In.TEXT:
                return self._plain_text()
            case _In.OPENED:
                return self._opened()
            case _In.CALL:
                return self._call()
            case _In.BEHIND_CALL:
                return self._behind_call()
            case _In.OVER:
                self._text = ""
                return False

    def _start(self) -> bool:
        if not self._framing.is_bare:
            self._in = _In.TEXT
            return True
        begin = skip_space(self._text)
        if begin == len(self._text) <= MAX_SPACE:
            return False
        if begin <= MAX_SPACE and self._text[begin] == "{":
            self._begin_attempt(begin, _In.OPENED)
        else:
            self._in = _In.TEXT
        return True

    def _plain_text(self) -> bool:
        shown, end = before_marker(self._text, self._framing.opener)
        if self._head:
            before_head, behind_head = before_marker(self._text, self._head)
            if len(before_head) < len(shown):
                shown, end = before_head, None if behind_head is None else behind_head - len(self._head)
        self._tell(shown)
        self._text = self._text[len(shown) :]
        if end is None:
            return False
        self._begin_attempt(end - len(shown), _In.OPENED)
        return True

    def _begin_attempt(self, num_read: int, where: _In) -> None:
        self._attempt, self._text = self._text[:num_read], self._text[num_read:]
        self._in = where

    def _opened(self) -> bool:
        """Between an opener, or a separator, and the call."""
        begin = skip_space(self._text)
        if begin > MAX_SPACE:
            self._give_up()
            return True
        if begin == len(self._text):
            return False
        opens_list = self._text[begin] == "[" and self._framing.is_list and not self._is_listing
        if opens_list:
            self._is_listing = True
            self._read(begin + 1)
        elif self._text[begin] == self._first:
            self._read(begin)
            self._reader, self._is_call_told = self._make_reader(), False
            self._in = _In.CALL
        else:
            self._give_up()
        return True

    def _read(self, num_read: int) -> None:
        self._attempt += self._text[:num_read]
        self._text = self._text[num_read:]

    def _call(self) -> bool:
        if self._is_call_told:
            self._text = self._text[self._reader.push(self._text) :]
        else:
            self._read(self._reader.push(self._text[: MAX_DOUBT - len(self._attempt)]))
        self._tell_call()
        if self._reader.is_broken or len(self._attempt) >= MAX_DOUBT:
            self._give_up()
        elif self._reader.is_complete:
            self._in = _In.OVER if self.num_calls == self._max_calls else _In.BEHIND_CALL
        return bool(self._text)

    def _tell_call(self) -> None:
        name = self._reader.name
        if name is None:
            return
        arguments = self._reader.take_arguments()
        if not self._is_call_told:
            self._pieces.append(ToolCallDelta(self.num_calls, arguments, self._make_id(), name))
            self._is_call_told, self._attempt = True, ""
            self.num_calls += 1
        elif arguments:
            self._pieces.append(ToolCallDelta(self.num_calls - 1, arguments))

    def _give_up(self) -> None:
        """No call began: its beginning is content, and the rest of the attempt is looked at again."""
        told = skip_space(self._attempt)
        opener = self._framing.opener
        told += len(opener) if opener and self._attempt.startswith(opener, told) else 1
        self._tell(self._attempt[:told])
        self._text = self._attempt[told:] + self._text
        self._attempt, self._is_listing, self._in = "", False, _In.TEXT

    def _behind_call(self) -> bool:
        """White space is no content here; what ends the call, or begins the next one, neither."""
        self._text = self._text[skip_space(self._text) :]
        if not self._text:
            return False
        framing, first = self._framing, self._text[0]
        if self._is_listing and first == "]":
            self._is_listing, self._text = False, self._text[1:]
        elif framing.closer and self._text.startswith(framing.closer):
            self._text = self._text[len(framing.closer) :]
        elif framing.closer.startswith(self._text):
            return False
        elif first == framing.between and (self._is_listing or not framing.is_list):
            self._begin_attempt(1, _In.OPENED)
        elif first == "{" and framing.is_bare:
            self._begin_attempt(0, _In.OPENED)
        else:
            self._in = _In.TEXT
        return True

    def _tell(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces
