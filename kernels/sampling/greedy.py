"""The most likely token of each row."""

import torch

_BLOCK = 128
"""Torch finds a maximum 6 times faster than its place (0.2 instead of 1.3 ms for 32 x 49152), so the place is looked
for in one block only. Most vocabularies are a multiple of this."""


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum [num_rows] and its lowest id [num_rows] int64 of `logits` [num_rows, vocab]; NaN is a maximum."""
    num_rows, vocab = logits.shape
    if vocab % _BLOCK:
        best = logits.max(dim=-1)
        return best.values, best.indices
    blocks = logits.reshape(num_rows, vocab // _BLOCK, _BLOCK)
    maxima, block = blocks.amax(dim=-1).max(dim=-1)
    place = blocks[torch.arange(num_rows, device=logits.device), block].argmax(dim=-1)
    return maxima, block * _BLOCK + place
