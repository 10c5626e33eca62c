"""The native kernels of single rows equal their references on every instruction set, whatever the row's length."""

import pytest
import torch

from kernels.native.library import Library
from kernels.paged_attention.native import page_shape
from kernels.rms_norm import native as rms_norm
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rotary import native as rotary
from kernels.rotary import reference as rotary_reference
from kernels.silu_mul import native as silu_mul
from kernels.silu_mul import reference as silu_mul_reference
from tests.support.tolerances import close

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 576), (7, 33), (0, 16), (5, 1), (3, 15), (2, 2049)]
LAYER = 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[1]).to(dtype)
    close(rms_norm.rms_norm(library, hidden, weight, 1e-5), rms_norm_reference.rms_norm(hidden, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_adds_to_the_residual_in_place(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, delta = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    expected_residual = residual.clone()
    expected = rms_norm_reference.add_rms_norm(expected_residual, delta, weight, 1e-5)
    close(rms_norm.add_rms_norm(library, residual, delta, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


def test_eps_guards_a_zero_row(library: Library) -> None:
    assert torch.equal(rms_norm.rms_norm(library, torch.zeros(1, 8), torch.ones(8), 1e-5), torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    close(silu_mul.silu_mul(library, gate_up), silu_mul_reference.silu_mul(gate_up))


def test_silu_mul_of_extremes(library: Library) -> None:
    gate = torch.tensor([[-3e38, -200.0, -90.0, -0.0, 0.0, 90.0, 3e38, torch.inf, torch.nan]])
    result = silu_mul.silu_mul(library, torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
    close(result[:-1], torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 90.0, 3e38, torch.inf]))
    assert result[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size", "head_dim"),
    [(9, 3, 16, 64), (2, 1, 1, 2), (3, 3, 4, 10), (4, 2, 32, 80), (1, 1, 1024, 256)],
)
def test_rotary_kv_write(
    library: Library, num_heads: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_tokens, num_blocks = 5, 7
    pages = torch.full((num_blocks, LAYER + 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = 7 * torch.randn(num_tokens, head_dim // 2)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    expected_pages, given = pages.clone(), qkv.clone()
    queries = rotary.rotary_kv_write(library, qkv, pages, LAYER, angles.cos(), angles.sin(), slots)

    rotated = rotary_reference.rotate(given[:, : num_heads + num_kv_heads].float(), angles.cos(), angles.sin())
    close(queries, rotated[:, :num_heads].to(dtype))
    keys, values = rotated[:, num_heads:].to(dtype), given[:, num_heads + num_kv_heads :]
    rotary_reference.kv_write(expected_pages[:, LAYER], slots, keys, values)
    assert torch.equal(pages.isnan(), expected_pages.isnan())
    close(pages.nan_to_num(), expected_pages.nan_to_num())
    assert torch.equal(qkv[:, num_heads:], given[:, num_heads:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_bitwise_the_row_in_a_batch(library: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 334).to(dtype), torch.randn(334).to(dtype)
    normed, gated = rms_norm.rms_norm(library, hidden, weight, 1e-5), silu_mul.silu_mul(library, hidden)
    for row in range(len(hidden)):
        alone = hidden[row : row + 1]
        assert torch.equal(rms_norm.rms_norm(library, alone, weight, 1e-5)[0], normed[row])
        assert torch.equal(silu_mul.silu_mul(library, alone)[0], gated[row])


@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_of_the_pages_is_refused(library: Library, slot: int) -> None:
    pages, angles = torch.zeros(2, 1, 2, 1, 16, 4), torch.zeros(1, 2)
    with pytest.raises(AssertionError):
        rotary.rotary_kv_write(library, torch.zeros(1, 3, 4), pages, 0, angles, angles, torch.tensor([slot]))


def test_other_dtypes_are_refused(library: Library) -> None:
    with pytest.raises(AssertionError):
        rms_norm.rms_norm(library, torch.zeros(1, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5)
    with pytest.raises(KeyError):
        silu_mul.silu_mul(library, torch.zeros(1, 8, dtype=torch.float16))


def test_odd_heads_are_refused() -> None:
    with pytest.raises(AssertionError):
        page_shape(torch.zeros(1, 1, 2, 1, 16, 3))
