"""Runs sequences through a `ModelRunner` with the simplest scheduler: each sequence computes one chunk a step."""

from collections import defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch

from common.messages.ids import BlockId, PlacementNumber, RequestId
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from common.model.batch import ForwardBatch
from common.runtime.runner import ModelRunner, allocate_pages
from common.scheduling.plan import Chunk, StepPlan
from common.scheduling.sequence import Sequence, SequenceKey
from tests.support.model_paths import AnyLlama

GREEDY = SamplingParams(seed=0, max_tokens=1_000, temperature=0.0)


def poisoned_pages(model: AnyLlama, num_blocks: int, block_size: int) -> torch.Tensor:
    """Return pages full of NaN, so that any read of an unwritten slot shows."""
    return allocate_pages(model.layout(block_size), num_blocks).fill_(torch.nan)


class BatchProbe:
    """Wraps a model; remembers the logits that the last tokens were sampled from, and how many rows it made at once.

    Replaces rows of logits if told to.
    """

    def __init__(self, model: AnyLlama) -> None:
        self._model = model
        self.logits = torch.empty(0)
        self.most_rows = 0
        self.replacements: dict[int, float] = {}

    def forward(self, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        return self._model.forward(batch, pages)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits = self._model.head(hidden)
        self.most_rows = max(self.most_rows, len(hidden))
        for row, value in self.replacements.items():
            self.logits[row : row + 1] = value
        return self.logits


@dataclass
class ModelDriver:
    """A pool that hands out scattered blocks, and sequences that run until they have their tokens.

    `logprobs` are those of the tokens sampled so far.
    """

    model: AnyLlama
    block_size: int = 16
    num_blocks: int = 128
    chunk_size: int = 512
    probe: BatchProbe = field(init=False)
    pages: torch.Tensor = field(init=False)
    runner: ModelRunner = field(init=False)
    free: list[int] = field(init=False)
    logprobs: defaultdict[SequenceKey, list[TokenLogprobs]] = field(init=False)

    def __post_init__(self) -> None:
        self.probe = BatchProbe(self.model)
        self.logprobs = defaultdict(list)
        self.pages = poisoned_pages(self.model, self.num_blocks, self.block_size)
        self.runner = ModelRunner(self.probe, self.pages, self.block_size)
        self.free = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self._num_sequences = 0

    def add(self, prompt: Several[int], sampling: SamplingParams = GREEDY) -> Sequence:
        """Return a new sequence of `prompt`."""
        self._num_sequences += 1
        key = SequenceKey(RequestId(f"request-{self._num_sequences}"), PlacementNumber(1))
        return Sequence(key, list(prompt), len(prompt), sampling, arrival=self._num_sequences)

    def preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks away; it computes everything again."""
        self.free.extend(sequence.block_ids)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        sequence.block_ids, sequence.num_computed = [], 0

    def plan(self, sequences: Several[Sequence]) -> StepPlan:
        """Return a step with one chunk of each sequence, which gets the blocks for it."""
        return StepPlan(tuple(self._chunk(sequence) for sequence in sequences))

    def step(self, sequences: Several[Sequence]) -> frozenset[SequenceKey]:
        """Compute one chunk of each sequence; append what was sampled; return the invalid ones."""
        plan = self.plan(sequences)
        result = self.runner.run(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.length
            sequence.prompt_logprobs += result.prompt_logprobs.get(sequence.key, ())
            if (token := result.tokens.get(sequence.key)) is not None:
                sequence.token_ids.append(token)
            if (logprobs := result.logprobs.get(sequence.key)) is not None:
                self.logprobs[sequence.key].append(logprobs)
        return result.invalid

    def generate(self, sequences: Several[Sequence], num_tokens: int) -> list[list[int]]:
        """Run until every sequence has `num_tokens` generated tokens; return them."""
        while running := [sequence for sequence in sequences if sequence.num_generated < num_tokens]:
            assert not self.step(running)
        return [sequence.token_ids[sequence.num_prompt :] for sequence in sequences]

    def _chunk(self, sequence: Sequence) -> Chunk:
        length = min(self.chunk_size, sequence.num_uncomputed)
        end = sequence.num_computed + length
        while len(sequence.block_ids) * self.block_size < end:
            sequence.block_ids.append(BlockId(self.free.pop()))
        return Chunk(sequence, sequence.num_computed, length, samples=end == sequence.num_tokens)
