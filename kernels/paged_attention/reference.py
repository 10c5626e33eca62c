"""Paged attention in plain torch, one sequence and one token at a time."""

from collections.abc import Sequence

import torch


def paged_attention(
    query: torch.Tensor,
    layer_pages: torch.Tensor,
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """Return the attended `query` [num_tokens, num_heads, head_dim], the chunks of all sequences one after another.

    `layer_pages` is [num_blocks, 2, num_kv_heads, block_size, head_dim]. The chunk of sequence i is its last
    `query_lengths[i]` tokens of `context_lengths[i]`, whose keys and values are in the blocks of `block_tables[i]`.
    A token sees itself and all before it. Consecutive query heads share one key-value head.
    """
    output = torch.empty_like(query)
    num_kv_heads, head_dim = layer_pages.shape[2], layer_pages.shape[4]
    group = query.shape[1] // num_kv_heads
    row = 0
    for length, context, table in zip(query_lengths, context_lengths, block_tables, strict=True):
        keys, values = _gather(layer_pages, table, context)
        for visible in range(context - length + 1, context + 1):
            heads = query[row].float().view(num_kv_heads, group, head_dim)
            scores = heads @ keys[:, :visible].transpose(1, 2) * head_dim**-0.5
            output[row] = (scores.softmax(-1) @ values[:, :visible]).view(-1, head_dim).to(output.dtype)
            row += 1
    return output


def _gather(layer_pages: torch.Tensor, table: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [num_kv_heads, context, head_dim] in fp32."""
    block_size = layer_pages.shape[3]
    slots = [(int(table[position // block_size]), position % block_size) for position in range(context)]
    tokens = torch.stack([layer_pages[block, :, :, offset] for block, offset in slots], dim=2).float()
    return tokens[0], tokens[1]
