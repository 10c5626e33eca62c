"""An answer on its way to a client as events: encoded when it is ready, written as fast as the client takes it."""

from collections.abc import Callable, Sequence

from msgspec import UNSET, UnsetType

from gateway.answer import Answer
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Piece
from gateway.api.shape import AnswerShape, UsageSlot
from gateway.engine import StageTimes
from gateway.outbox import Outbox
from gateway.schemas.usage import Timing
from gateway.sse import DONE, EventStream
from gateway.text_stream import AnswerToken
from gateway.validation import AnswerForm


class StreamSink:
    """An `AnswerSink` that encodes events into an outbox, up to and including `[DONE]`. `timing` is asked at the end
    if the client wants to be told, with what workers told."""

    def __init__(
        self,
        shape: AnswerShape,
        outbox: Outbox[bytes],
        form: AnswerForm,
        timing: Callable[[StageTimes | None], Timing] | None,
    ) -> None:
        self._shape = shape
        self._outbox = outbox
        self._form = form
        self._timing = timing
        self._unused: UsageSlot = None if form.includes_usage else UNSET
        self._tells_usage = form.has_running_usage
        self._answer: Answer

    def start(self, answer: Answer) -> None:
        """Count with that answer."""
        self._answer = answer

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        """Encode more of a choice."""
        usage = self._answer.usage if self._tells_usage else self._unused
        self._outbox.put(self._shape.delta(index, pieces, tokens, usage))

    def end(self, choice: AnswerChoice) -> None:
        """Encode the end of a choice, and behind the last one the end of the answer."""
        is_last = self._answer.is_over
        timing = self._timing(self._answer.times) if is_last and self._timing is not None else UNSET
        tells_here: Timing | UnsetType = UNSET if self._form.includes_usage else timing
        ending = self._shape.ending(choice.index, choice.finish_reason, self._running_usage(), tells_here)
        if is_last and self._form.includes_usage:
            ending += self._shape.closing(self._answer.usage, timing)
        self._outbox.put(ending + DONE if is_last else ending, is_last=is_last)

    @property
    def is_full(self) -> bool:
        """Whether the client is so far behind that no more should be generated."""
        return self._outbox.is_full

    async def room(self) -> None:
        """Wait for the client."""
        await self._outbox.room()

    def _running_usage(self) -> UsageSlot:
        return self._answer.usage if self._tells_usage else self._unused


class EventCarrier:
    """Writes encoded events into an event stream; a quiet one gets comments."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream

    async def carry(self, items: Sequence[bytes], *, is_last: bool) -> None:
        """Write events, all in one write."""
        await self._stream.send(b"".join(items), is_last=is_last)

    async def reassure(self) -> None:
        """Write a comment."""
        await self._stream.ping()
