"""The vectors of every instruction set compute what torch does."""

import ctypes

import pytest
import torch

from tests.kernels.conftest import Probe


@pytest.fixture(scope="module")
def functions(probe: Probe) -> ctypes.CDLL:
    functions = probe("vectors")
    functions.total.restype = functions.greatest.restype = ctypes.c_float
    return functions


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _interesting() -> torch.Tensor:
    """Floats of all exponents from the least normal one, ties to even on both sides, infinities, zeros and NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    upper = torch.randint(0x0080, 0x7F7F, (512,), generator=generator)
    ties = ((upper << 16) | 0x8000).to(torch.int32)
    near = torch.cat((ties, ties + 1, ties - 1, (upper << 16).to(torch.int32)))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 3.4e38, -3.4e38])
    payload = torch.tensor([0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0x7F80FFFF]).to(torch.int32)  # kinds of NaN
    numbers = torch.cat((bits.view(torch.float32), near.view(torch.float32), -near.view(torch.float32), special))
    numbers = torch.cat((numbers, payload.view(torch.float32)))
    numbers = numbers[~((numbers.abs() < 2.0**-126) & (numbers != 0))]  # instructions take subnormals for 0
    return torch.cat((numbers, torch.zeros(-len(numbers) % 16)))


@pytest.mark.parametrize("entry", ["narrow", "narrow_one_by_one"])
def test_rounding_to_bfloat16_is_torch_s(functions: ctypes.CDLL, entry: str) -> None:
    numbers = _interesting()
    result = torch.full(numbers.shape, 7.0, dtype=torch.bfloat16)
    functions[entry](_pointer(numbers), _pointer(result), ctypes.c_int64(len(numbers)))
    expected = numbers.bfloat16()
    is_nan = numbers.isnan()
    assert bool(is_nan.any())
    assert torch.equal(result.isnan(), is_nan)
    assert torch.equal(result[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@pytest.mark.parametrize("entry", ["widen", "widen_one_by_one"])
def test_widening_changes_no_bit(functions: ctypes.CDLL, entry: str) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    result = torch.empty(len(numbers))
    functions[entry](_pointer(numbers), _pointer(result), ctypes.c_int64(len(numbers)))
    expected = torch.arange(-(2**15), 2**15).to(torch.int32) << 16
    assert torch.equal(result.view(torch.int32), expected)


def test_sum_and_maximum_take_all_lanes(functions: ctypes.CDLL) -> None:
    for lane in range(16):
        numbers = torch.full((48,), -5.0)
        numbers[16 + lane] = 2.0**lane
        assert functions.greatest(_pointer(numbers), ctypes.c_int64(48)) == 2.0**lane
        assert functions.total(_pointer(numbers), ctypes.c_int64(48)) == 2.0**lane - 5 * 47


@pytest.mark.parametrize("entry", ["add_dots", "add_dots_with_first"])
def test_dot_of_pairs(functions: ctypes.CDLL, entry: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 64, 2, generator=generator).bfloat16()
    result = torch.randn(64, generator=generator)
    expected = result + ((a if entry == "add_dots" else a[:1]).double() * b.double()).sum(1)
    functions[entry](_pointer(result), _pointer(a.contiguous()), _pointer(b.contiguous()), ctypes.c_int64(64))
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
