"""Rotary embedding and KV write equal their references, and touch nothing but their slots."""

import pytest
import torch

from kernels.rotary import reference
from kernels.rotary.op import plan_rotary, rotary_kv_write
from tests.support.tolerances import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 33])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 1, 6, 1)])
def test_equals_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_tokens)
    num_blocks, num_layers, layer = 40, 3, 1
    pages = torch.randn(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim).to(dtype)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(num_tokens, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()

    expected_pages = pages.clone()
    rotated = reference.rotate(qkv[:, : num_heads + num_kv_heads], cos, sin)
    values = qkv[:, num_heads + num_kv_heads :].clone()
    reference.kv_write(expected_pages[:, layer], slots, rotated[:, num_heads:], values)

    query = rotary_kv_write(qkv, pages, layer, plan_rotary(cos, sin, slots, pages))
    close(query, rotated[:, :num_heads])
    close(pages, expected_pages)
    assert torch.equal(pages[:, [0, 2]], expected_pages[:, [0, 2]])
    assert torch.equal(pages[:, 1, 1], expected_pages[:, 1, 1])


def test_pages_that_are_not_contiguous_are_refused() -> None:
    pages = torch.zeros(4, 2, 2, 3, 2, 4).transpose(3, 4)
    with pytest.raises(AssertionError):
        plan_rotary(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), pages)
