"""A sequence: the tokens of one placement and how far their keys and values are computed.

Owned by the engine thread of one worker; nobody else touches it. There are no phases: a sequence has `num_computed`
tokens and wants to catch up with `num_tokens`. Chunked prefill, prefix hits, resumed and decoding sequences are that.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from common.cache.prefix import HashChain
from common.messages.ids import FIRST_CHOICE, BlockId, ChoiceIndex, PlacementNumber, RequestId, TryNumber
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams


class PlacementKey(NamedTuple):
    """What all sequences of one placement have in common."""

    request: RequestId
    placement: PlacementNumber


class SequenceKey(NamedTuple):
    """What a sequence is called in every queue, map and message of a worker.

    A prefill worker tells the tries of a placement apart; on a decode worker they are one sequence per choice.
    """

    request: RequestId
    placement: PlacementNumber
    try_number: TryNumber = TryNumber(0)
    choice: ChoiceIndex = FIRST_CHOICE

    @property
    def of_placement(self) -> PlacementKey:
        """The placement that the sequence belongs to."""
        return PlacementKey(self.request, self.placement)


class FinishReason(enum.StrEnum):
    """Why a sequence ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """`token_ids` is prompt, then generated tokens (those shown by earlier placements included).

    `block_ids[i]` holds the keys and values of tokens `[i * block_size, (i + 1) * block_size)`. The first `num_cached`
    tokens came from the prefix cache. `arrival` orders sequences by age and survives preemption. One that `runs_alone`
    is suspected of having ended a process: no other sequence has pages while it has.
    """

    key: SequenceKey
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    arrival: int
    cache_salt: str = ""
    runs_alone: bool = False
    block_ids: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are computed; only where asked for."""
    hash_chain: HashChain = field(init=False)

    def __post_init__(self) -> None:
        self.hash_chain = HashChain(self.cache_salt)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens that the client receives: index of the next one to sample."""
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt are asked for and not complete. Until they are, every token of the prompt must
        be computed here, one after another: a cached one has no logits. Who continues an answer does not ask again.
        """
        is_asked = self.sampling.num_prompt_logprobs is not None and self.num_generated == 0
        return is_asked and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are still missing."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_common(self) -> int:
        """Tokens whose keys and values another choice of the request can bring: the prompt, but never the last token
        that is known, which is left to compute."""
        return min(self.num_prompt, len(self.token_ids) - 1)
