"""The tensors of one step: what the chunks of its plan are to the model's forward pass."""

from collections.abc import Sequence as Several

import torch

from common.model.batch import ForwardBatch
from common.scheduling.plan import Chunk


def batch_order(chunk: Chunk) -> tuple[bool, int]:
    """Sort key: decoding sequences first, longest context first, so that attention pads little."""
    return chunk.length > 1, -chunk.start


def forward_batch(chunks: Several[Chunk], block_size: int, device: torch.device) -> ForwardBatch:
    """Return the batch of `chunks`, in this order.

    Wanted are the last rows of the chunks that sample, then the rows of all positions that are scored.
    """
    query_lengths = [chunk.length for chunk in chunks]
    context_lengths = [chunk.start + chunk.length for chunk in chunks]
    tables = _block_tables(chunks, context_lengths, block_size)
    positions = torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.length)])
    owners = torch.arange(len(chunks)).repeat_interleave(torch.tensor(query_lengths))
    columns = torch.div(positions, block_size, rounding_mode="floor")
    slots = tables[owners, columns] * block_size + (positions - columns * block_size)
    token_ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.length]]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids).to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        wanted=_wanted(chunks).to(device),
        block_tables=tables,
        query_lengths=query_lengths,
        context_lengths=context_lengths,
    )


def _wanted(chunks: Several[Chunk]) -> torch.Tensor:
    sampled: list[int] = []
    scored: list[int] = []
    first = 0
    for chunk in chunks:
        if chunk.samples:
            sampled.append(first + chunk.length - 1)
        scored.extend(first + position for position in chunk.scored)
        first += chunk.length
    return torch.tensor(sampled + scored, dtype=torch.int64)


def _block_tables(chunks: Several[Chunk], context_lengths: Several[int], block_size: int) -> torch.Tensor:
    """Return [num_seqs, max_blocks]; entries beyond a context repeat block 0 and are never read."""
    counts = [-(-context // block_size) for context in context_lengths]
    widest = max(counts)
    rows = []
    for chunk, count in zip(chunks, counts, strict=True):
        blocks = chunk.sequence.block_ids
        assert len(blocks) >= count, (chunk.sequence.key, len(blocks), count)
        rows.append(blocks[:count] + [0] * (widest - count))
    return torch.tensor(rows, dtype=torch.int64)
