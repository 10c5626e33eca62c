"""Launcher of rotary embedding and KV write. Torch's operators on every device today; `triton.py` plugs in here.

What is equal for all layers of a step is prepared once, by `plan_rotary`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """Angles and destinations of one step's tokens.

    `cos`, `sin` are [num_tokens, 1, head_dim]; the first half of `sin` is negated, so that rotating is a multiply-add
    with the swapped halves. `rows` [num_tokens, 2 * num_kv_heads] counts rows of head_dim numbers from layer 0's first.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


def plan_rotary(cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> RotaryPlan:
    """Prepare a step: `cos`, `sin` [num_tokens, head_dim / 2] fp32, `slots` [num_tokens] int64.

    `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous. Slot s is token
    `s % block_size` of block `s // block_size`.
    """
    assert pages.is_contiguous()
    assert slots.dtype == torch.int64, slots.dtype
    _, num_layers, _, num_kv_heads, block_size, head_dim = pages.shape
    assert cos.shape == sin.shape == (slots.shape[0], head_dim // 2), (cos.shape, sin.shape, slots.shape)
    heads = torch.arange(2 * num_kv_heads, device=slots.device) * block_size
    block = torch.div(slots, block_size, rounding_mode="floor")
    row = block * (num_layers * 2 * num_kv_heads * block_size) + (slots - block * block_size)
    return RotaryPlan(
        cos=torch.cat((cos, cos), dim=-1).to(pages.dtype).unsqueeze(1),
        sin=torch.cat((-sin, sin), dim=-1).to(pages.dtype).unsqueeze(1),
        rows=row.unsqueeze(1) + heads,
    )


def rotary_kv_write(qkv: torch.Tensor, pages: torch.Tensor, layer: int, plan: RotaryPlan) -> torch.Tensor:
    """Rotate queries and keys in place, write keys and values into the pages of `layer`; return the queries.

    `qkv` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], heads of q first, then k, then v. The result is the
    view [num_tokens, num_heads, head_dim] of it.
    """
    _, _, _, num_kv_heads, block_size, head_dim = pages.shape
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    assert num_heads > 0, qkv.shape
    assert qkv.shape[0] == plan.rows.shape[0], (qkv.shape, plan.rows.shape)
    assert qkv.dtype == pages.dtype, (qkv.dtype, pages.dtype)
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = torch.roll(rotated, head_dim // 2, dims=-1)
    rotated.mul_(plan.cos).addcmul_(swapped, plan.sin)
    layer_rows = pages.view(-1, head_dim)[layer * 2 * num_kv_heads * block_size :]
    layer_rows.index_put_((plan.rows,), qkv[:, num_heads:])
    return qkv[:, :num_heads]
