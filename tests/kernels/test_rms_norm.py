"""RMS normalisation equals its reference."""

import pytest
import torch

from kernels.rms_norm import reference
from kernels.rms_norm.op import add_rms_norm, rms_norm
from tests.support.tolerances import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 576), (7, 33), (0, 16), (65, 1)])
def test_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[1]).to(dtype)
    close(rms_norm(hidden, weight, 1e-5), reference.rms_norm(hidden, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_residual_is_updated_in_place(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    residual, delta = torch.randn(num_tokens, 33).to(dtype), torch.randn(num_tokens, 33).to(dtype)
    weight = torch.randn(33).to(dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(expected_residual, delta, weight, 1e-5)
    close(add_rms_norm(residual, delta, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


def test_eps_guards_a_zero_row() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-5), torch.zeros(1, 8))


def test_other_dtype_of_weight_is_refused() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.zeros(1, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5)
