"""The in-memory twin of the cluster: plays scripts of tokens, pauses, failures and silence to the gateway."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from common.messages.ids import ChoiceIndex, RequestId
from common.messages.registry import ModelCard
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, GenerateRequest, Readiness, TokenDelta

DEADLINE_S = 5.0


@dataclass(frozen=True)
class Until:
    """Wait for an event."""

    event: asyncio.Event


@dataclass(frozen=True)
class Silence:
    """Never say anything again."""


@dataclass(frozen=True)
class Stop:
    """End of the stream; `num_generated` counts the tokens played."""

    reason: FinishReason = FinishReason.STOP
    num_cached: int = 0


@dataclass(frozen=True)
class Vanish:
    """The stream ends without an end: a bug that the gateway has to notice."""


Step = tuple[int, ...] | int | Until | Silence | Stop | Vanish | Exception


@dataclass
class ScriptedEngine:
    """Plays `scripts` one per request, the last one again and again. Tokens run out at `max_tokens`, as in a worker."""

    cards: Sequence[ModelCard]
    scripts: list[list[Step]] = field(default_factory=lambda: [[Stop()]])
    state: Readiness = field(default_factory=lambda: Readiness(is_ready=True))
    requests: list[GenerateRequest] = field(default_factory=list)
    ended: set[tuple[RequestId, ChoiceIndex]] = field(default_factory=set)
    num_running: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def models(self) -> Sequence[ModelCard]:
        return self.cards

    def readiness(self) -> Readiness:
        return self.state

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        self.ended.add((request, choice))

    def play(self, *scripts: list[Step]) -> None:
        """Play these from now on."""
        self.scripts = list(scripts)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.requests.append(request)
        await self._count(+1)
        try:
            async for event in _play(script, request.sampling.max_tokens):
                if (request.request, event.choice) in self.ended:
                    return
                yield event
        finally:
            self.num_running -= 1
            self._tell = asyncio.ensure_future(self._count(0))

    async def until_running(self, num_running: int) -> None:
        """Wait until exactly so many requests hold something."""
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(lambda: self.num_running == num_running)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.num_running += change
            self.changed.notify_all()


async def _play(script: list[Step], max_tokens: int) -> AsyncGenerator[GenerateEvent, None]:
    num_generated = 0
    for step in script:
        match step:
            case int() | tuple():
                ids = step if isinstance(step, tuple) else (step,)
                ids = ids[: max_tokens - num_generated]
                yield TokenDelta(num_generated, ids)
                num_generated += len(ids)
                if num_generated == max_tokens:
                    yield EndOfChoice(FinishReason.LENGTH, num_generated)
                    return
            case Until(event):
                await event.wait()
            case Silence():
                await asyncio.Event().wait()
            case Stop(reason, num_cached):
                yield EndOfChoice(reason, num_generated, num_cached)
                return
            case Vanish():
                return
            case Exception():
                raise step
