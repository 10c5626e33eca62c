"""The tensors of one step: what the chunks of its plan are to the model's forward pass."""

from collections.abc import Sequence as Several
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from common.model.batch import ForwardBatch
from common.runtime.block_tables import BlockTables
from common.scheduling.plan import Chunk


def batch_order(chunk: Chunk) -> tuple[bool, int]:
    """Sort key: decoding sequences first, longest context first, so that attention pads little."""
    return chunk.length > 1, -chunk.start


def forward_batch(
    chunks: Several[Chunk], block_size: int, device: torch.device, block_tables: BlockTables
) -> ForwardBatch:
    """Return the batch of `chunks`, in this order.

    Wanted are the last rows of the chunks that sample, then the rows of all positions that are scored.
    """
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    contexts = starts + lengths
    tables = block_tables.of(chunks, (-(-contexts // block_size)).tolist())
    ends = lengths.cumsum()
    # Row r of chunk i is token `starts[i] + r - firsts[i]` of its sequence.
    positions = np.arange(ends[-1]) + (contexts - ends).repeat(lengths)
    columns = positions // block_size
    slots = tables[np.arange(len(chunks)).repeat(lengths), columns] * block_size + (positions - columns * block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(_token_ids(chunks, int(ends[-1]))).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        wanted=torch.from_numpy(_wanted(chunks, ends - lengths)).to(device),
        block_tables=torch.from_numpy(tables),
        query_lengths=lengths.tolist(),
        context_lengths=contexts.tolist(),
    )


def _token_ids(chunks: Several[Chunk], num_tokens: int) -> npt.NDArray[np.int64]:
    if num_tokens == len(chunks):
        ids = [chunk.sequence.token_ids[chunk.start] for chunk in chunks]
    else:
        parts = (chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length] for chunk in chunks)
        ids = list(chain.from_iterable(parts))
    return np.array(ids, dtype=np.int64)


def _wanted(chunks: Several[Chunk], firsts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    sampled: list[int] = []
    scored: list[int] = []
    for chunk, first in zip(chunks, firsts.tolist(), strict=True):
        if chunk.samples:
            sampled.append(first + chunk.length - 1)
        if chunk.sequence.sampling.num_prompt_logprobs is not None:
            scored.extend(first + position for position in chunk.scored)
    return np.array(sampled + scored, dtype=np.int64)
