"""Where the answer of a response goes: into events for a client that streams, or into nothing but the response."""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET

from gateway.answer import Answer
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Piece
from gateway.engine import StageTimes
from gateway.outbox import Outbox
from gateway.responses.writer import ResponseWriter
from gateway.schemas.responses import Event
from gateway.schemas.usage import Timing
from gateway.text_stream import AnswerToken

_encode = msgspec.json.Encoder().encode

TellTiming = Callable[[StageTimes | None], Timing]


class WholeResponse:
    """An `AnswerSink` that tells nobody before the end. `timing` is asked then, None: the client does not want it."""

    def __init__(self, writer: ResponseWriter, timing: TellTiming | None) -> None:
        self._writer = writer
        self._timing = timing
        self._answer: Answer

    def start(self, answer: Answer) -> None:
        """Count with that answer."""
        self._answer = answer

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        """Take more."""
        self._tell(self._writer.delta(pieces, tokens))

    def end(self, choice: AnswerChoice) -> None:
        """Take the end."""
        timing = UNSET if self._timing is None else self._timing(self._answer.times)
        self._tell(self._writer.end(choice.reason, self._answer.usage, timing), is_last=True)

    @property
    def is_full(self) -> bool:
        """Whether the client is so far behind that no more should be generated."""
        return False

    async def room(self) -> None:
        """There is always room."""

    def _tell(self, events: Iterable[Event], *, is_last: bool = False) -> None:
        for _ in events:
            pass


class StreamedResponse(WholeResponse):
    """An `AnswerSink` that encodes every event into an outbox."""

    def __init__(self, writer: ResponseWriter, timing: TellTiming | None, outbox: Outbox[bytes]) -> None:
        super().__init__(writer, timing)
        self._outbox = outbox

    @property
    def is_full(self) -> bool:
        """Whether the client is so far behind that no more should be generated."""
        return self._outbox.is_full

    async def room(self) -> None:
        """Wait for the client."""
        await self._outbox.room()

    def _tell(self, events: Iterable[Event], *, is_last: bool = False) -> None:
        encoded = b"".join(map(event_bytes, events))
        if encoded:
            self._outbox.put(encoded, is_last=is_last)


def event_bytes(event: Event) -> bytes:
    """Return an event with its name, as one line of JSON."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encode(event))
