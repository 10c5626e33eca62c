"""Launcher of native linears on packed weights."""

import ctypes
import functools
from collections.abc import Callable

import torch

from kernels.linear.packing import PackedLinear
from kernels.native.arguments import dtype_number
from kernels.native.library import Library
from kernels.native.team import Team


def linear(x: torch.Tensor, weights: PackedLinear, team: Team, *, is_output_float: bool = False) -> torch.Tensor:
    """Return `x @ weight.T + bias` [num_rows, num_out], and if gated `silu(gate) * up` of that; sums are in fp32.

    `x` is [num_rows, num_in] contiguous of the weights' dtype; the result is of it too, or fp32 if `is_output_float`.
    A row of the result does not depend on the other rows, nor on the number of threads.
    """
    assert x.ndim == 2, x.shape
    assert x.shape[1] == weights.num_in, (x.shape, weights.num_in)
    assert x.dtype == weights.dtype, (x.dtype, weights.dtype)
    assert x.is_contiguous(), x.stride()
    output = torch.empty(len(x), weights.num_out, dtype=torch.float32 if is_output_float else x.dtype)
    _entry(team.library)(
        team.handle,
        dtype_number(x.dtype),
        x.data_ptr(),
        len(x),
        weights.packed.data_ptr(),
        None if weights.bias is None else weights.bias.data_ptr(),
        weights.num_out,
        weights.num_in,
        weights.is_gated,
        is_output_float,
        output.data_ptr(),
    )
    return output


@functools.cache
def _entry(library: Library) -> Callable[..., None]:
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function = library.functions.tandem_linear
    function.argtypes = [pointer, flag, pointer, count, pointer, pointer, count, count, flag, flag, pointer]
    function.restype = None
    entry: Callable[..., None] = function
    return entry
