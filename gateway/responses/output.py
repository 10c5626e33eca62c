"""The output of a response: out of the pieces of its answer, one item behind the other, and the events that tell of it.

An item is open until a piece of another kind comes. A message has the logprobs of the tokens that came with its text; a
token whose text is held back waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from gateway.answer_parser import Content, Piece, Reasoning, ToolCallDelta
from gateway.schemas.chat import TokenLogprob
from gateway.schemas.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Event,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    TextDelta,
    TextDone,
)
from gateway.text_stream import AnswerToken

ReadLogprobs = Callable[[Sequence[AnswerToken]], list[TokenLogprob]]

Number = Callable[[], int]
"""Returns the number of the next event."""


class _OpenItem(Protocol):
    """An item that may still grow."""

    def takes(self, piece: Piece) -> bool:
        """Whether the piece belongs to it."""

    def begin(self) -> Iterator[Event]:
        """Tell that it is there."""

    def grow(self, piece: Piece, tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        """Take more."""

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        """Tell that it is over; the last event has the whole item."""


class Output:
    """The items of one response. `response_id` makes their ids; `read_logprobs` None: they were not asked for."""

    def __init__(self, response_id: str, number: Number, read_logprobs: ReadLogprobs | None) -> None:
        self._ids = response_id.partition("_")[2]
        self._number = number
        self._read_logprobs = read_logprobs
        self._open: _OpenItem | None = None
        self._waiting: list[AnswerToken] = []
        self.items: list[OutputItem] = []
        """Those that are over."""

    def add(self, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        """Take pieces of the answer, and tokens that came with them."""
        if self._read_logprobs is not None:
            self._waiting += tokens
        texts = [place for place, piece in enumerate(pieces) if isinstance(piece, Content)]
        for place, piece in enumerate(pieces):
            if self._open is None or not self._open.takes(piece):
                yield from self._close("completed")
                self._open = self._new_item(piece)
                yield from self._open.begin()
            yield from self._open.grow(piece, self._waiting if texts[-1:] == [place] else ())
        if pieces:
            self._waiting = []

    def finish(self, *, is_cut: bool) -> Iterator[Event]:
        """There are no more pieces. An answer of nothing is an empty message."""
        if self._open is None and not self.items:
            self._open = self._message()
            yield from self._open.begin()
        if self._waiting and isinstance(self._open, _Message):
            yield from self._open.grow(Content(""), self._waiting)  # half a character, or nothing that is shown
        yield from self._close("incomplete" if is_cut else "completed")

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        for event in self._open.finish(status):
            if isinstance(event, ItemDone):
                self.items.append(event.item)
            yield event
        self._open = None

    def _new_item(self, piece: Piece) -> _OpenItem:
        index = len(self.items)
        match piece:
            case Content():
                return self._message()
            case Reasoning():
                return _Thoughts(f"rs_{self._ids}{index:04x}", index, self._number)
            case ToolCallDelta():
                return _Call(f"fc_{self._ids}{index:04x}", index, self._number, piece)

    def _message(self) -> "_Message":
        index = len(self.items)
        return _Message(f"msg_{self._ids}{index:04x}", index, self._number, self._read_logprobs)


class _Message:
    def __init__(self, item_id: str, index: int, number: Number, read_logprobs: ReadLogprobs | None) -> None:
        self._id = item_id
        self._place = (item_id, index, 0)
        self._index = index
        self._number = number
        self._read_logprobs = read_logprobs
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Content)

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._index, MessageItem(self._id, "in_progress", ()))
        yield PartAdded(self._number(), *self._place, OutputText(""))

    def grow(self, piece: Piece, tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        assert isinstance(piece, Content)
        logprobs = [] if self._read_logprobs is None or not tokens else self._read_logprobs(tokens)
        if not self._texts:
            logprobs = _from_text_on(logprobs, piece.text.encode())
        self._logprobs += logprobs
        self._texts.append(piece.text)
        yield TextDelta(self._number(), *self._place, piece.text, tuple(logprobs))

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        part = OutputText("".join(self._texts), logprobs=tuple(self._logprobs))
        yield TextDone(self._number(), *self._place, part.text, part.logprobs)
        yield PartDone(self._number(), *self._place, part)
        yield ItemDone(self._number(), self._index, MessageItem(self._id, status, (part,)))


class _Thoughts:
    def __init__(self, item_id: str, index: int, number: Number) -> None:
        self._id = item_id
        self._place = (item_id, index, 0)
        self._index = index
        self._number = number
        self._texts: list[str] = []

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, Reasoning)

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._index, ReasoningItem(self._id, "in_progress", ()))
        yield PartAdded(self._number(), *self._place, ReasoningText(""))

    def grow(self, piece: Piece, tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        assert isinstance(piece, Reasoning)
        self._texts.append(piece.text)
        yield ReasoningDelta(self._number(), *self._place, piece.text)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        part = ReasoningText("".join(self._texts))
        yield ReasoningDone(self._number(), *self._place, part.text)
        yield PartDone(self._number(), *self._place, part)
        yield ItemDone(self._number(), self._index, ReasoningItem(self._id, status, (part,)))


class _Call:
    def __init__(self, item_id: str, index: int, number: Number, first: ToolCallDelta) -> None:
        assert first.id is not None  # it begins the call
        assert first.name is not None
        self._item = CallItem(item_id, "in_progress", first.id, first.name, "")
        self._call_index = first.index
        self._index = index
        self._number = number
        self._arguments: list[str] = []

    def takes(self, piece: Piece) -> bool:
        return isinstance(piece, ToolCallDelta) and piece.index == self._call_index

    def begin(self) -> Iterator[Event]:
        yield ItemAdded(self._number(), self._index, self._item)

    def grow(self, piece: Piece, tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        assert isinstance(piece, ToolCallDelta)
        if piece.arguments:
            self._arguments.append(piece.arguments)
            yield ArgumentsDelta(self._number(), self._item.id, self._index, piece.arguments)

    def finish(self, status: ItemStatus) -> Iterator[Event]:
        item = msgspec.structs.replace(self._item, status=status, arguments="".join(self._arguments))
        yield ArgumentsDone(self._number(), item.id, self._index, item.name, item.arguments)
        yield ItemDone(self._number(), self._index, item)


def _from_text_on(entries: list[TokenLogprob], text: bytes) -> list[TokenLogprob]:
    """Return the tokens from where the text begins: before it may stand markers, and white space behind them."""
    for place, entry in enumerate(entries):
        rest = b"".join(bytes(other.bytes) for other in entries[place:])
        if rest.startswith(text) or (bytes(entry.bytes).strip() and rest.lstrip().startswith(text)):
            return entries[place:]
    return entries
