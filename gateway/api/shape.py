"""How an endpoint writes answers as JSON: chunks of a stream, or the whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UnsetType

from gateway.accepting import Accepted
from gateway.answer_parser import Piece
from gateway.api.heading import Heading
from gateway.collection import WholeChoice
from gateway.schemas.usage import Timing, Usage
from gateway.text_stream import AnswerToken

_encode = msgspec.json.Encoder().encode

_MARK = "\0text\0"
_ENCODED_MARK = _encode(_MARK)

UsageSlot = Usage | UnsetType | None
"""The usage of a chunk: counts, or what stands for none (`Heading.unused`)."""


class AnswerShape(Protocol):
    """Writes the answer of one request. Chunks are returned as whole events, one or several."""

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken], usage: UsageSlot) -> bytes:
        """Return the chunks of more of a choice."""

    def ending(self, index: int, reason: str, usage: UsageSlot, timing: Timing | UnsetType) -> bytes:
        """Return the last chunk of a choice."""

    def closing(self, usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the chunk that holds the usage."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What sets an endpoint's answers apart: what their ids begin with, and their shape."""

    id_prefix: str
    shape: Callable[[Heading, Accepted], AnswerShape]


class TextChunks:
    """Chunks that hold nothing but text: all the rest is encoded once per choice. `make` returns one as an event."""

    def __init__(self, make: Callable[[int, str], bytes]) -> None:
        self._make = make
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, text: str) -> bytes:
        """Return the event of that text."""
        before, after = self._halves.get(index) or self._split(index)
        return b"%b%b%b" % (before, _encode(text), after)

    def _split(self, index: int) -> tuple[bytes, bytes]:
        before, _, after = self._make(index, _MARK).partition(_ENCODED_MARK)
        self._halves[index] = before, after
        return before, after
