"""The seam between what clients see and what generates tokens: text on one side, token ids on the other.

Implementations: the cluster (placement through Redis, token frames over gRPC) and a scripted one for tests.
"""

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.ids import Fingerprint, ModelName, RequestId, WorkerId
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why an answer ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice to generate. `prompt_ids` is never empty.

    `traceparent` and `tracestate` name the span that waits for the answer. `fingerprint` names the version of the model
    whose tokenizer made the ids. `deadline_s` is the time from the call until the request is given up, None: never.
    `worker` names the only worker that may decode it; None: any.
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


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Generated tokens `[index, index + len(token_ids))`: in order, each exactly once.

    `num_cached_tokens` of the prompt came from a prefix cache; the same in every delta of an answer.
    """

    index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The answer is complete. `num_cached_tokens` as in the deltas."""

    finish_reason: FinishReason
    num_generated: int
    num_cached_tokens: int = 0


GenerateEvent = TokenDelta | EndOfStream


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a request could be served now, and if not, why."""

    is_ready: bool
    reason: str = ""


class Engine(Protocol):
    """Generates tokens."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield deltas, then exactly one `EndOfStream`, or raise `Unavailable` or `GenerationFailed`
        (`DeadlineExceeded` when the request's time is over, wherever it is then).

        Closing the generator, or cancelling whoever awaits it, cancels the request and releases all it holds at once.
        """

    async def models(self) -> Sequence[ModelCard]:
        """Return the models that the registry knows now; raises `Unavailable`."""

    def readiness(self) -> Readiness:
        """Return whether a request could be served now."""
