"""The gated activation equals its reference."""

import pytest
import torch

from kernels.silu_mul import reference
from kernels.silu_mul.op import silu_mul
from tests.support.tolerances import close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3072), (7, 66), (0, 32), (33, 2)])
def test_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(shape).to(dtype)
    before = gate_up.clone()
    close(silu_mul(gate_up), reference.silu_mul(gate_up))
    assert torch.equal(gate_up, before)


def test_odd_width_is_refused() -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(1, 3))
