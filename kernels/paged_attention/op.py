"""Launcher of paged attention. Every device runs torch's operators today; `triton.py` is chosen here for CUDA."""

import torch
from torch.nn import functional

from kernels.paged_attention.plan import AttentionPlan, DecodeBucket, PromptChunk


def paged_attention(query: torch.Tensor, pages: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """Return [num_tokens, num_heads * head_dim] for `query` [num_tokens, num_heads, head_dim].

    `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the query's dtype; the keys and
    values of the query's own tokens are already in it. Consecutive query heads share one key-value head. Slots beyond
    a context may hold anything, NaN included.
    """
    _, num_layers, _, num_kv_heads, block_size, head_dim = pages.shape
    num_tokens, num_heads, _ = query.shape
    assert num_tokens == plan.num_tokens, (num_tokens, plan.num_tokens)
    assert query.shape[2] == head_dim, (query.shape, pages.shape)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert query.dtype == pages.dtype, (query.dtype, pages.dtype)
    assert 0 <= layer < num_layers, layer
    rows = pages.view(-1, block_size * head_dim)[layer * 2 * num_kv_heads :]
    grouped = query.view(
        num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim
    )  # [num_tokens, num_kv_heads, group, head_dim]
    output = torch.empty(grouped.shape, dtype=query.dtype, device=query.device)
    for bucket in plan.buckets:
        _decode(grouped[bucket.first : bucket.last], rows, bucket, output[bucket.first : bucket.last])
    for chunk in plan.chunks:
        _prefill(grouped[chunk.first : chunk.last], rows, chunk, output[chunk.first : chunk.last])
    return output.view(num_tokens, num_heads * head_dim)


def _decode(query: torch.Tensor, rows: torch.Tensor, bucket: DecodeBucket, output: torch.Tensor) -> None:
    """Attend one token per sequence: two batched products over (sequence, key-value head).

    Torch's fused CPU attention takes 2-3 times as long for so few query rows, and 5 times with its own grouping.
    """
    num_kv_heads, group, head_dim = query.shape[1:]
    batch = query.shape[0] * num_kv_heads
    torch.index_select(rows, 0, bucket.rows, out=bucket.gathered)
    if len(bucket.stale):
        bucket.gathered.view(-1, head_dim).index_fill_(0, bucket.stale, 0)
    keys, values = bucket.gathered.view(2, batch, -1, head_dim).unbind()
    heads = query.reshape(batch, group, head_dim)
    scores = torch.baddbmm(bucket.mask, heads, keys.transpose(1, 2), alpha=head_dim**-0.5)
    torch.bmm(scores.softmax(-1), values, out=output.view(batch, group, head_dim))


def _prefill(query: torch.Tensor, rows: torch.Tensor, chunk: PromptChunk, output: torch.Tensor) -> None:
    """Attend one chunk; key-value heads are the batch, so that the group shares keys without a copy."""
    num_kv_heads, group, head_dim = query.shape[1:]
    gathered = rows.index_select(0, chunk.rows).view(2, num_kv_heads, 1, -1, head_dim)
    keys, values = gathered[:, :, :, : chunk.context].expand(-1, -1, group, -1, -1).unbind()
    attended = functional.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    output.copy_(attended.permute(2, 0, 1, 3))
