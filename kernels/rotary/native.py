"""Launcher of the native CPU kernel of rotary embedding and KV write."""

import ctypes

import torch

from kernels.native.arguments import address, count, dtype_number
from kernels.native.library import Library
from kernels.paged_attention.native import page_shape


def rotary_kv_write(
    library: Library,
    qkv: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries in place, write rotated keys and values into the pages of `layer`; return the queries.

    `qkv` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], heads of q first, then k, then v, which stay as they
    are. `cos`, `sin` are [num_tokens, head_dim / 2] fp32, `slots` [num_tokens] int64: slot s is token `s % block_size`
    of block `s // block_size`. `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
    """
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = pages.shape
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads
    assert num_heads > 0, qkv.shape
    assert qkv.shape[2] == head_dim, (qkv.shape, pages.shape)
    assert qkv.dtype == pages.dtype, (qkv.dtype, pages.dtype)
    assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
    assert cos.shape == sin.shape == (num_tokens, head_dim // 2), (cos.shape, sin.shape, qkv.shape)
    assert slots.dtype == torch.int64, slots.dtype
    assert slots.shape == (num_tokens,), (slots.shape, qkv.shape)
    assert all(tensor.is_contiguous() for tensor in (qkv, pages, cos, sin, slots))
    assert 0 <= layer < num_layers, layer
    if num_tokens:
        assert 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size, (slots, pages.shape)
    library.functions.tandem_rotary_kv_write(
        dtype_number(qkv.dtype),
        address(qkv),
        address(cos),
        address(sin),
        address(slots),
        count(num_tokens),
        count(num_heads),
        ctypes.byref(page_shape(pages)),
        count(layer),
        address(pages),
    )
    return qkv[:, :num_heads]
