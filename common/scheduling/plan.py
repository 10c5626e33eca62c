"""What one engine step does, as data: the scheduler decides, the runner obeys, settle closes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from common.messages.ids import BlockId
from common.messages.logprobs import TokenLogprobs
from common.scheduling.sequence import Sequence, SequenceKey


class Chunk(msgspec.Struct, frozen=True):  # a frozen dataclass takes three times as long to make, once per token
    """Compute tokens `[start, start + length)` of `sequence`; sample a token after the last one if `samples`."""

    sequence: Sequence
    start: int
    length: int
    samples: bool

    @property
    def num_pairs(self) -> int:
        """Pairs of a computed token and one that it attends to, itself included."""
        return self.length * self.start + self.length * (self.length + 1) // 2

    @property
    def scored(self) -> range:
        """Positions within the chunk whose logits say how likely the next token of the prompt was; none unless the
        sequence wants that."""
        if not self.sequence.wants_prompt_logprobs:
            return range(0)
        return range(min(self.length, self.sequence.num_prompt - 1 - self.start))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole page within the pool, before anything is computed. Of the copies of one step no page is the target
    of two, or of one and the source of another."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks to compute in this step, decoding sequences (length 1) first, and pages to copy before that. Without
    chunks: nothing to do."""

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that belong to a prompt: not generated, whether computed for the first time or again."""
        return sum(max(0, min(chunk.length, chunk.sequence.num_prompt - chunk.start)) for chunk in self.chunks)

    @property
    def num_pairs(self) -> int:
        """Pairs of a computed token and one that it attends to: what attention costs grows with them."""
        return sum(chunk.num_pairs for chunk in self.chunks)

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled token by sequence. A sequence in `invalid` had NaN logits, one in `violated` could not go on within its
    grammar: no token was sampled for them.

    `logprobs` belong to the sampled tokens; `prompt_logprobs[key]` to the tokens of the chunk and the one behind it, as
    far as they are the prompt's and not its first. Both only where asked for. `run_s` is how long the step took, in
    seconds; 0 where nobody has measured that.
    """

    tokens: Mapping[SequenceKey, int]
    invalid: frozenset[SequenceKey] = field(default_factory=frozenset)
    violated: frozenset[SequenceKey] = field(default_factory=frozenset)
    logprobs: Mapping[SequenceKey, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[SequenceKey, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    run_s: float = 0.0
