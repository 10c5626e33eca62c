"""Launcher of the native CPU kernel, with the signatures of `op.py` after the library."""

import ctypes

import torch

from kernels.native.arguments import address, count, dtype_number
from kernels.native.library import Library


def rms_norm(library: Library, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `hidden` [num_tokens, size] divided by its root mean square and scaled by `weight` [size]."""
    return _launch(library, hidden, None, weight, eps)


def add_rms_norm(
    library: Library, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the normalised sum; all [num_tokens, size]."""
    assert delta.shape == residual.shape, (delta.shape, residual.shape)
    assert delta.dtype == residual.dtype, (delta.dtype, residual.dtype)
    assert delta.is_contiguous()
    return _launch(library, residual, delta, weight, eps)


def _launch(
    library: Library, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    assert hidden.ndim == 2, hidden.shape
    assert weight.shape == hidden.shape[1:], (weight.shape, hidden.shape)
    assert weight.dtype == hidden.dtype, (weight.dtype, hidden.dtype)
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    output = torch.empty_like(hidden)
    library.functions.tandem_rms_norm(
        dtype_number(hidden.dtype),
        address(hidden),
        None if delta is None else address(delta),
        address(weight),
        ctypes.c_float(eps),
        count(hidden.shape[0]),
        count(hidden.shape[1]),
        address(output),
    )
    return output
