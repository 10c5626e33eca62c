"""Rotary embedding and the write into pages in plain torch, token by token."""

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `heads` [num_tokens, num_heads, head_dim] rotated; `cos` and `sin` are [num_tokens, head_dim / 2].

    Element i is paired with element i + head_dim / 2.
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def kv_write(layer_pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write `keys` and `values` [num_tokens, num_kv_heads, head_dim] into one layer's pages.

    `layer_pages` is [num_blocks, 2, num_kv_heads, block_size, head_dim]; slot s is token `s % block_size` of block
    `s // block_size`.
    """
    block_size = layer_pages.shape[3]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        layer_pages[block, 0, :, offset] = keys[token]
        layer_pages[block, 1, :, offset] = values[token]
