"""Runs a step: copies of pages, one forward pass over the plan's chunks, one token per sequence that samples.

Owned by the engine thread. It reads sequences and writes pages; it changes no sequence.
"""

import logging
import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from typing import Protocol

import torch

from common.cache.layout import KVLayout
from common.errors import GrammarViolated
from common.model.batch import ForwardBatch
from common.runtime.block_tables import BlockTables
from common.runtime.scoring import prompt_logprobs, sampled_logprobs
from common.runtime.step_batch import batch_order, forward_batch
from common.scheduling.plan import BlockCopy, Chunk, StepPlan, StepResult
from common.scheduling.sequence import Sequence, SequenceKey
from kernels.sampling.op import NoToken, sample
from kernels.sampling.row import SamplingRow

logger = logging.getLogger(__name__)


def allocate_pages(
    layout: KVLayout, num_blocks: int, buffer: memoryview | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return pages [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contents undefined.

    With a `buffer` (writable, at least `num_blocks * layout.page_bytes` bytes) the pages are its first bytes; without
    one, memory that the system provides page by page when it is first touched.
    """
    shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    if buffer is None:
        return torch.empty(shape, dtype=dtype, device=device)
    assert not buffer.readonly
    assert buffer.nbytes >= num_blocks * layout.page_bytes, (buffer.nbytes, num_blocks, layout.page_bytes)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """Write the batch's keys and values into `pages`; return hidden states [num_wanted, hidden_size]."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] fp32 of `hidden` [num_rows, hidden_size]."""


class TokenMasks(Protocol):
    """Which tokens may come next in sequences that have a grammar."""

    def allowed(self, sequence: Sequence) -> torch.Tensor | None:
        """Return the tokens that may follow `sequence.token_ids`; None if the sequence has no grammar.

        Bit `t % 32` of word `t // 32` of the result [num_words] int32 is set if token t is allowed. Tokens behind the
        last word are forbidden, bits behind the vocabulary mean nothing. It belongs to the caller.

        Raises `GrammarViolated` if the sequence cannot go on within its grammar.
        """


class ModelRunner:
    """`pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], see `allocate_pages`. Without `masks`
    no sequence may have a grammar."""

    def __init__(
        self, model: CausalModel, pages: torch.Tensor, block_size: int, masks: TokenMasks | None = None
    ) -> None:
        assert pages.shape[4] == block_size, (pages.shape, block_size)
        self._model = model
        self._pages = pages
        self._block_size = block_size
        self._masks = masks
        self._block_tables = BlockTables()

    def run(self, plan: StepPlan) -> StepResult:
        """Copy the plan's pages, compute its chunks, sample.

        Sequences whose logits hold NaN or +inf, or only -inf, are `invalid`, wherever in the chunk logits are wanted.
        """
        if not plan:
            assert not plan.copies, "pages are copied for something that is computed"
            return StepResult(tokens={})
        chunks = sorted(plan.chunks, key=batch_order)
        sampling = [chunk for chunk in chunks if chunk.samples]
        batch = forward_batch(chunks, self._block_size, self._pages.device, self._block_tables)
        with torch.inference_mode():
            copy_pages(self._pages, plan.copies)
            hidden = self._model.forward(batch, self._pages)
            prompts = prompt_logprobs(self._model.head, hidden[len(sampling) :], chunks)
            logits = self._model.head(hidden[: len(sampling)])
            choices = sample(logits, [self._sampling_row(chunk) for chunk in sampling])
            by_key = dict(zip((chunk.sequence.key for chunk in sampling), choices, strict=True))
            invalid = _keys_of(by_key, NoToken.INVALID) | _keys_of(prompts, None)
            tokens = {key: token for key, token in by_key.items() if isinstance(token, int) and key not in invalid}
            logprobs = sampled_logprobs(logits, sampling, tokens)
        return StepResult(
            tokens=tokens,
            invalid=invalid,
            violated=_keys_of(by_key, NoToken.VIOLATED) - invalid,
            logprobs=logprobs,
            prompt_logprobs={key: scores for key, scores in prompts.items() if scores is not None},
        )

    def _sampling_row(self, chunk: Chunk) -> SamplingRow:
        sequence = chunk.sequence
        assert chunk.start + chunk.length == sequence.num_tokens, (sequence.key, chunk.start, chunk.length)
        return SamplingRow(
            token_ids=sequence.token_ids,
            num_prompt=sequence.num_prompt,
            controls=sequence.sampling,
            choice=sequence.key.choice,
            allowed=self._allowed(sequence),
        )

    def _allowed(self, sequence: Sequence) -> torch.Tensor | None:
        if sequence.sampling.grammar is None:
            return None
        assert self._masks is not None, f"{sequence.key} has a grammar that nobody follows"
        try:
            return self._masks.allowed(sequence)
        except GrammarViolated as error:
            logger.info("no token allowed: %s", error, extra={"request_id": sequence.key.request})
            return torch.empty(0, dtype=torch.int32)  # no word: every token is forbidden


def copy_pages(pages: torch.Tensor, copies: Several[BlockCopy]) -> None:
    """Copy whole pages within `pages` [num_blocks, ...]. None is written twice, or written and read."""
    if not copies:
        return
    sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
    assert len(set(targets)) == len(targets), f"one page gets two contents: {copies}"
    assert not set(targets) & set(sources), f"a page is overwritten before it is read: {copies}"
    pages[torch.tensor(targets)] = pages[torch.tensor(sources)]


def _keys_of(outcomes: Mapping[SequenceKey, object], wanted: object) -> frozenset[SequenceKey]:
    return frozenset(key for key, outcome in outcomes.items() if outcome is wanted)
