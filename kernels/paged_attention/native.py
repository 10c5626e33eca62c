"""Launcher of the native CPU kernel: pages are read in place, decoding tokens and chunks in one call."""

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from kernels.native.arguments import address, count, dtype_number
from kernels.native.library import Library


class PageShape(ctypes.Structure):
    """As in `pages.h`."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in ("num_layers", "num_kv_heads", "block_size", "head_dim")]


class AttentionShape(ctypes.Structure):
    """As in `plan.h`."""

    _fields_: ClassVar = [("pages", PageShape), ("num_heads", ctypes.c_int64)]


class AttentionBatch(ctypes.Structure):
    """As in `plan.h`; the tensors whose addresses it has must live as long."""

    _fields_: ClassVar = [
        ("num_sequences", ctypes.c_int64),
        ("query_lengths", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
    ]


def page_shape(pages: torch.Tensor) -> PageShape:
    """Describe `pages` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; odd heads are refused."""
    _, num_layers, two, num_kv_heads, block_size, head_dim = pages.shape
    assert two == 2, pages.shape
    assert head_dim % 2 == 0, head_dim
    assert block_size & (block_size - 1) == 0, block_size
    return PageShape(num_layers, num_kv_heads, block_size, head_dim)


def paged_attention(
    library: Library,
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_tables: torch.Tensor,
    num_threads: int = 1,
) -> torch.Tensor:
    """Return [num_tokens, num_heads * head_dim] for `query` [num_tokens, num_heads, head_dim], heads contiguous.

    `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the query's dtype, contiguous; the
    keys and values of the query's own tokens are already in it. The chunk of sequence i is its last `query_lengths[i]`
    tokens of `context_lengths[i]`; `block_tables` [num_seqs, max_blocks] int64 names its blocks, entries beyond the
    context are ignored. Slots beyond a context may hold anything, NaN included. The result of a token depends on
    nothing but the token and its context.
    """
    num_tokens, num_heads, head_dim = query.shape
    assert pages.is_contiguous()
    assert query.stride()[1:] == (head_dim, 1), query.stride()
    assert head_dim == pages.shape[5], (query.shape, pages.shape)
    assert num_heads % pages.shape[3] == 0, (num_heads, pages.shape)
    assert query.dtype == pages.dtype, (query.dtype, pages.dtype)
    assert 0 <= layer < pages.shape[1], layer
    lengths, contexts = _checked_lengths(query_lengths, context_lengths, block_tables, pages)
    assert num_tokens == int(lengths.sum()), (num_tokens, query_lengths)
    shape = AttentionShape(page_shape(pages), num_heads)
    batch = AttentionBatch(
        len(lengths), lengths.data_ptr(), contexts.data_ptr(), block_tables.data_ptr(), block_tables.stride(0)
    )
    output = torch.empty(num_tokens, num_heads * head_dim, dtype=query.dtype)
    library.functions.tandem_paged_attention(
        dtype_number(query.dtype),
        ctypes.byref(shape),
        ctypes.byref(batch),
        address(query),
        count(query.stride(0)),
        address(pages),
        count(layer),
        address(output),
        ctypes.c_int32(num_threads),
    )
    return output


def _checked_lengths(
    query_lengths: Sequence[int], context_lengths: Sequence[int], block_tables: torch.Tensor, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both lengths as tensors; no block outside of `pages` is named for a context."""
    assert block_tables.dtype == torch.int64, block_tables.dtype
    assert block_tables.stride(-1) == 1 or block_tables.shape[1] <= 1, block_tables.stride()
    assert len(query_lengths) == len(context_lengths) == len(block_tables)
    lengths, contexts = torch.tensor(query_lengths, dtype=torch.int64), torch.tensor(context_lengths, dtype=torch.int64)
    assert bool(((lengths >= 0) & (lengths <= contexts)).all()), (query_lengths, context_lengths)
    num_blocks = -(-contexts // pages.shape[4])
    assert bool((num_blocks <= block_tables.shape[1]).all()), (context_lengths, block_tables.shape)
    used = block_tables[torch.arange(block_tables.shape[1]) < num_blocks.unsqueeze(1)]
    assert bool(((used >= 0) & (used < len(pages))).all()), block_tables
    return lengths, contexts
