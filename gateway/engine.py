"""The seam between what clients see and what generates tokens: text on one side, token ids on the other.

Implementations: the cluster (placement through Redis, token frames over gRPC) and a scripted one for tests.
"""

import enum
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.messages.ids import (
    ANYBODY,
    FIRST_CHOICE,
    ChoiceIndex,
    Fingerprint,
    ModelName,
    RequestId,
    TenantId,
    WorkerId,
)
from common.messages.logprobs import TokenLogprobs
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why an answer ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class TokenDelta(msgspec.Struct, frozen=True):
    """Generated tokens `[index, index + len(token_ids))` of one choice: in order, each exactly once.

    `num_cached_tokens` of the prompt came from a prefix cache; the same in every delta of an answer. `logprobs` has one
    entry per token if they were asked for. `prompt_logprobs`, of the prompt's tokens from the second on, come with the
    first delta of the request if they were asked for, and with no other.

    A `Struct`, as it is made for every event: that takes a fifth of the time of a frozen dataclass.
    """

    index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    choice: ChoiceIndex = FIRST_CHOICE
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Tap(Protocol):
    """Takes tokens the moment they come: the turn of whoever waits for the generator costs as much as all the rest
    that is done with a token."""

    @property
    def is_open(self) -> bool:
        """Whether it takes what comes now. Otherwise the generator yields it, together with what follows meanwhile."""

    def take(self, delta: TokenDelta) -> None:
        """Take tokens. What this raises is raised by the generator."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`num_choices` answers to one prompt. `prompt_ids` is never empty.

    `traceparent` and `tracestate` name the span that waits for the answer. `fingerprint` names the version of the model
    whose tokenizer made the ids. `deadline_s` is the time from the call until the request is given up, None: never.
    `worker` names the only worker that may decode it; None: any. `tenant`, its `weight` (of a fair share) and
    `priority` (higher is sooner) order those that wait for room.

    `vocab_size` bounds the ids that may come back (None: they are not checked).

    `tap` may be given tokens in place of the generator's reader, in their order, while that one waits for the next
    event: what the tap was given is not yielded.
    """

    request: RequestId
    model: ModelName
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    cache_salt: str = ""
    traceparent: str = ""
    tracestate: str = ""
    fingerprint: Fingerprint | None = None
    deadline_s: float | None = None
    worker: WorkerId | None = None
    num_choices: int = 1
    tenant: TenantId = ANYBODY
    priority: int = 0
    weight: float = 1.0
    vocab_size: int | None = None
    tap: Tap | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where an answer's time went behind the gateway, in seconds: until its last placement was accepted, until its
    prefill began, until the first token, pulling pages (overlaps the prefill), and generating."""

    queue_s: float = 0.0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndOfChoice:
    """One choice is complete. `num_cached_tokens` as in the deltas. `times` None: its worker told none."""

    finish_reason: FinishReason
    num_generated: int
    num_cached_tokens: int = 0
    choice: ChoiceIndex = FIRST_CHOICE
    times: StageTimes | None = None


GenerateEvent = TokenDelta | EndOfChoice


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now, and if not, why."""

    is_ready: bool
    reason: str = ""


class Generation(Protocol):
    """An answer on its way, read like an `AsyncGenerator`, by one task."""

    def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        """Return itself."""

    def __anext__(self) -> Awaitable[GenerateEvent]:
        """Return the next event."""

    def aclose(self) -> Awaitable[None]:
        """Give up what is left."""


class Engine(Protocol):
    """Generates tokens."""

    def generate(self, request: GenerateRequest) -> Generation:
        """Yield the deltas and one `EndOfChoice` of every choice, the choices in any order, and return behind the last;
        or raise `Unavailable` or `GenerationFailed` (`DeadlineExceeded` when the request's time is over, wherever it is
        then).

        Closing the generator, or cancelling whoever awaits it, cancels the request and releases all it holds at once.
        """

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        """Nobody needs more of this choice (a stop string was met): nothing more of it is yielded, no end either, and
        `generate` returns when no other is left. Nothing happens if it is over."""

    async def models(self) -> Sequence[ModelCard]:
        """Return the models that the registry knows now; raises `Unavailable`."""

    def readiness(self) -> Readiness:
        """Return whether a request could be served now."""
