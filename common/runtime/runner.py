"""Runs a step: tensors from the plan's sequences, one forward pass, one token per sequence that samples.

Owned by the engine thread. It reads sequences and writes pages; it changes no sequence.
"""

import math
from collections.abc import Sequence as Several
from typing import Protocol

import torch

from common.cache.layout import KVLayout
from common.model.batch import ForwardBatch
from common.scheduling.plan import Chunk, StepPlan, StepResult
from common.scheduling.sequence import Sequence
from kernels.sampling.op import sample
from kernels.sampling.row import SamplingRow


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
        """Write the batch's keys and values into `pages`; return logits [num_sampled, vocab_size] fp32."""


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

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's chunks; sequences whose logits hold NaN or +inf, or only -inf, are `invalid`."""
        if not plan:
            return StepResult(tokens={})
        chunks = sorted(plan.chunks, key=_batch_order)
        sampling = [chunk for chunk in chunks if chunk.samples]
        with torch.inference_mode():
            logits = self._model.forward(self._batch(chunks), self._pages)
            tokens = sample(logits, [_sampling_row(chunk) for chunk in sampling])
        by_key = dict(zip((chunk.sequence.key for chunk in sampling), tokens, strict=True))
        return StepResult(
            tokens={key: token for key, token in by_key.items() if token is not None},
            invalid=frozenset(key for key, token in by_key.items() if token is None),
        )

    def _batch(self, chunks: Several[Chunk]) -> ForwardBatch:
        block_size, device = self._block_size, self._pages.device
        query_lengths = [chunk.length for chunk in chunks]
        context_lengths = [chunk.start + chunk.length for chunk in chunks]
        tables = self._block_tables(chunks, context_lengths)
        positions = torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.length)])
        owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor(query_lengths))
        columns = torch.div(positions, block_size, rounding_mode="floor")
        slots = tables[owners, columns] * block_size + (positions - columns * block_size)
        last_rows = torch.tensor(query_lengths).cumsum(0) - 1
        token_ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.length]]
        return ForwardBatch(
            token_ids=torch.tensor(token_ids).to(device),
            positions=positions.to(device),
            slots=slots.to(device),
            sampled=last_rows[torch.tensor([chunk.samples for chunk in chunks])].to(device),
            block_tables=tables,
            query_lengths=query_lengths,
            context_lengths=context_lengths,
        )

    def _block_tables(self, chunks: Several[Chunk], context_lengths: Several[int]) -> torch.Tensor:
        """Return [num_seqs, max_blocks]; entries beyond a context repeat block 0 and are never read."""
        counts = [-(-context // self._block_size) for context in context_lengths]
        widest = max(counts)
        rows = []
        for chunk, count in zip(chunks, counts, strict=True):
            blocks = chunk.sequence.block_ids
            assert len(blocks) >= count, (chunk.sequence.key, len(blocks), count)
            rows.append(blocks[:count] + [0] * (widest - count))
        return torch.tensor(rows, dtype=torch.int64)


def _batch_order(chunk: Chunk) -> tuple[bool, int]:
    """Decoding sequences first, longest context first, so that attention pads little."""
    return chunk.length > 1, -chunk.start


def _sampling_row(chunk: Chunk) -> SamplingRow:
    sequence = chunk.sequence
    assert chunk.start + chunk.length == sequence.num_tokens, (sequence.key, chunk.start, chunk.length)
    return SamplingRow(token_ids=sequence.token_ids, num_prompt=sequence.num_prompt, controls=sequence.sampling)
