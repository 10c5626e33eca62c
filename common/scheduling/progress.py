"""What a prefill scheduler tells about a prompt after a step: which blocks can be pulled, and the first token."""

from dataclasses import dataclass

from common.messages.logprobs import TokenLogprobs
from common.scheduling.emission import FailureCode
from common.scheduling.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class Progress:
    """The first `num_ready_blocks` blocks are complete and stay as they are until the sequence is released.

    The last block of a prompt counts, even if it is not full, once `token` (the first sampled one) is there. `failure`
    means that the sequence is over and its pages are released. `num_cached` tokens came from the prefix cache.
    `logprobs` of `token` and those of the whole prompt come with it, if asked for.
    """

    key: SequenceKey
    num_ready_blocks: int
    token: int | None = None
    failure: FailureCode | None = None
    num_cached: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
