"""What a model's forward pass is given: one step's tokens, ragged, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Chunks of all sequences, one after another; row r of the forward pass is token r.

    The chunk of sequence i is its last `query_lengths[i]` tokens of `context_lengths[i]`, whose keys and values are in
    the blocks of `block_tables[i]`. Slot s is token `s % block_size` of block `s // block_size`. The hidden states of
    rows `wanted` are, in this order.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slots: torch.Tensor  # [num_tokens] int64
    wanted: torch.Tensor  # [num_wanted] int64
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int64
    query_lengths: Sequence[int]
    context_lengths: Sequence[int]
