"""The in-memory twin of the cluster: plays scripts of tokens, pauses, failures and silence to the gateway."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from common.messages.ids import FIRST_CHOICE, ChoiceIndex, RequestId
from common.messages.logprobs import TokenLogprobs
from common.messages.registry import ModelCard
from gateway.engine import (
    EndOfChoice,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Readiness,
    StageTimes,
    TokenDelta,
)

DEADLINE_S = 5.0


@dataclass(frozen=True)
class Until:
    """Wait for an event."""

    event: asyncio.Event


@dataclass(frozen=True)
class Silence:
    """Never say anything again."""


@dataclass(frozen=True)
class Say:
    """Tokens of one choice, together. Bare ids, or a tuple of them, are said by the first choice."""

    choice: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """What is told if they are asked for; else `logprobs_of`."""


@dataclass(frozen=True)
class Stop:
    """End of a choice; `num_generated` counts the tokens played."""

    reason: FinishReason = FinishReason.STOP
    num_cached: int = 0
    choice: int = FIRST_CHOICE
    times: StageTimes | None = None


@dataclass(frozen=True)
class Vanish:
    """The stream ends without an end: a bug that the gateway has to notice."""


Step = tuple[int, ...] | int | Say | Until | Silence | Stop | Vanish | Exception


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Return what the scripted engine tells of a token: the lower its id modulo 32, the likelier it is."""
    return TokenLogprobs(_logprob_of(token_id), tuple((other, _logprob_of(other)) for other in range(num_top)))


def _logprob_of(token_id: int) -> float:
    return -0.25 * (1 + token_id % 32)


@dataclass
class ScriptedEngine:
    """Plays `scripts` one per prompt, the last one again and again. A choice ends at `max_tokens`, as in a worker."""

    cards: Sequence[ModelCard]
    scripts: list[list[Step]] = field(default_factory=lambda: [[Stop()]])
    state: Readiness = field(default_factory=lambda: Readiness(is_ready=True))
    requests: list[GenerateRequest] = field(default_factory=list)
    ended: set[tuple[RequestId, ChoiceIndex]] = field(default_factory=set)
    """Choices that the gateway needs no more of."""
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
        stage = _Stage(request)
        try:
            for step in script:
                await _pause(step)
                for event in stage.act(step):
                    if (request.request, event.choice) not in self.ended:
                        yield event
                ended = {choice for ended, choice in self.ended if ended == request.request}
                if isinstance(step, Vanish) or stage.num_open(ended) == 0:
                    return
        finally:
            self.num_running -= 1
            self._tell = asyncio.ensure_future(self._count(0))

    async def until_running(self, num_running: int) -> None:
        """Wait until exactly so many prompts hold something."""
        async with asyncio.timeout(DEADLINE_S), self.changed:
            await self.changed.wait_for(lambda: self.num_running == num_running)

    async def _count(self, change: int) -> None:
        async with self.changed:
            self.num_running += change
            self.changed.notify_all()


class _Stage:
    """What has been said of one prompt's choices."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._num_said = [0] * request.num_choices
        self._open = set(range(request.num_choices))
        self._is_prompt_told = False

    def num_open(self, ended: set[ChoiceIndex]) -> int:
        return len(self._open - ended)

    def act(self, step: Step) -> Iterator[GenerateEvent]:
        """Yield the events of a step."""
        match step:
            case int():
                yield from self._say(Say(0, (step,)))
            case tuple():
                yield from self._say(Say(0, step))
            case Say():
                yield from self._say(step)
            case Stop():
                yield self._end(step.choice, step.reason, step)
            case Exception():
                raise step

    def _say(self, said: Say) -> Iterator[GenerateEvent]:
        index, sampling = self._num_said[said.choice], self._request.sampling
        ids = said.ids[: sampling.max_tokens - index]
        yield TokenDelta(
            index=index,
            token_ids=ids,
            choice=ChoiceIndex(said.choice),
            logprobs=self._logprobs(said)[: len(ids)],
            prompt_logprobs=self._prompt_logprobs(),
        )
        self._num_said[said.choice] += len(ids)
        if self._num_said[said.choice] == sampling.max_tokens:
            yield self._end(said.choice, FinishReason.LENGTH, Stop())

    def _logprobs(self, said: Say) -> tuple[TokenLogprobs, ...]:
        num_top = self._request.sampling.num_logprobs
        if num_top is None:
            return ()
        return said.logprobs or tuple(logprobs_of(token_id, num_top) for token_id in said.ids)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        num_top = self._request.sampling.num_prompt_logprobs
        if num_top is None or self._is_prompt_told:
            return ()
        self._is_prompt_told = True
        return tuple(logprobs_of(token_id, num_top) for token_id in self._request.prompt_ids[1:])

    def _end(self, choice: int, reason: FinishReason, stop: Stop) -> EndOfChoice:
        self._open.discard(choice)
        return EndOfChoice(reason, self._num_said[choice], stop.num_cached, ChoiceIndex(choice), stop.times)


async def _pause(step: Step) -> None:
    match step:
        case Until(event):
            await event.wait()
        case Silence():
            await asyncio.Event().wait()
