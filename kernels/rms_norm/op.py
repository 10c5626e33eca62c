"""Launcher of RMS normalisation. Every device runs torch's operator today; `triton.py` is chosen here for CUDA."""

import torch
from torch.nn import functional


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `hidden` [num_tokens, size] divided by its root mean square and scaled by `weight` [size]."""
    assert hidden.ndim == 2, hidden.shape
    assert weight.shape == hidden.shape[1:], (weight.shape, hidden.shape)
    assert weight.dtype == hidden.dtype, (weight.dtype, hidden.dtype)
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the normalised sum; all [num_tokens, size]."""
    assert delta.shape == residual.shape, (delta.shape, residual.shape)
    residual.add_(delta)
    return rms_norm(residual, weight, eps)
