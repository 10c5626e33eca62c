"""Exponentials of vectors keep their stated errors, and are exact where softmax relies on it."""

import ctypes

import pytest
import torch

from tests.kernels.conftest import Probe


@pytest.fixture(scope="module")
def functions(probe: Probe) -> ctypes.CDLL:
    return probe("exponential")


def apply(functions: ctypes.CDLL, entry: str, numbers: torch.Tensor) -> torch.Tensor:
    padded = torch.cat((numbers, torch.zeros(-len(numbers) % 16)))
    result = torch.full_like(padded, torch.nan)
    functions[entry](
        ctypes.c_void_p(padded.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(len(padded))
    )
    return result[: len(numbers)]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (result.double() / expected - 1).abs()


def test_powers_of_2(functions: ctypes.CDLL) -> None:
    numbers = torch.cat((torch.linspace(-126, 127, 100_003), torch.linspace(-1, 1, 100_003)))
    result = apply(functions, "power_of_2", numbers)
    assert float(relative_error(result, numbers.double().exp2()).max()) < 2e-7
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(apply(functions, "power_of_2", whole), whole.exp2())


def test_powers_of_e(functions: ctypes.CDLL) -> None:
    numbers = torch.linspace(-87, 88, 100_003)
    error = relative_error(apply(functions, "power_of_e", numbers), numbers.double().exp())
    assert bool((error < 1e-7 * (2 + numbers.abs())).all())


@pytest.mark.parametrize("entry", ["power_of_2", "power_of_e"])
def test_what_lies_beyond_floats(functions: ctypes.CDLL, entry: str) -> None:
    numbers = torch.tensor([-torch.inf, -3e38, -200.0, torch.inf, 3e38, 200.0, 0.0, -0.0])
    expected = torch.tensor([0.0, 0.0, 0.0, torch.inf, torch.inf, torch.inf, 1.0, 1.0])
    assert torch.equal(apply(functions, entry, numbers), expected)
    assert apply(functions, entry, torch.tensor([torch.nan])).isnan().all()


def test_the_least_floats_come_out_no_greater(functions: ctypes.CDLL) -> None:
    numbers = torch.linspace(-160, -126, 1000)
    result = apply(functions, "power_of_2", numbers)
    assert bool((result >= 0).all())
    assert bool((result <= 2.0**-126).all())
