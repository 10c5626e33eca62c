"""What a decode scheduler tells about a sequence after a step: its next tokens, and whether it is over."""

import enum

import msgspec

from common.messages.logprobs import TokenLogprobs
from common.scheduling.sequence import FinishReason, SequenceKey


class FailureCode(enum.StrEnum):
    """Why a sequence failed; travels as the code of the error event."""

    INVALID_LOGITS = "invalid_logits"
    GRAMMAR_VIOLATED = "grammar_violated"
    """No token could continue the answer within its grammar, or the grammar became too large to follow."""
    PREEMPTED = "preempted"
    """Lost its pages to older sequences too often; another worker may have room."""


class Emission(msgspec.Struct, frozen=True):  # a frozen dataclass takes 0.9 us to make, once per token
    """New generated tokens of one sequence. `finish` or `failure` make it the last emission of that sequence.

    `index` counts from 0 among the generated tokens, those of earlier placements included; `chain` hashes the generated
    ids before it. `num_cached` counts prompt tokens whose keys and values came from a prefix cache. A failure has no
    tokens. `logprobs` has one entry per token if they were asked for, else none; `prompt_logprobs` those of the prompt
    from its second token on, in the first emission of the sequence that computed it.
    """

    key: SequenceKey
    index: int
    token_ids: tuple[int, ...]
    chain: int
    finish: FinishReason | None = None
    failure: FailureCode | None = None
    num_cached: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the sequence is over and its pages are released."""
        return self.finish is not None or self.failure is not None
