"""What one engine step does, as data: the scheduler decides, the runner obeys, settle closes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.scheduling.sequence import Sequence, SequenceKey


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens `[start, start + length)` of `sequence`; sample a token after the last one if `samples`."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks to compute in this step, decoding sequences (length 1) first. Empty: nothing to do."""

    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """Those of them that belong to a prompt: not generated, whether computed for the first time or again."""
        return sum(max(0, min(chunk.length, chunk.sequence.num_prompt - chunk.start)) for chunk in self.chunks)

    def __bool__(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled token by sequence. A sequence in `invalid` had NaN logits: no token was sampled for it."""

    tokens: Mapping[SequenceKey, int]
    invalid: frozenset[SequenceKey] = field(default_factory=frozenset)
