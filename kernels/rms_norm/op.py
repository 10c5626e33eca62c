"""Launcher of RMS normalisation: torch's operators on every device today; `triton.py` is chosen here for CUDA."""

import torch
from torch.nn import functional


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `hidden` [num_tokens, size] divided by its root mean square and scaled by `weight` [size]."""
    assert hidden.ndim == 2, hidden.shape
    assert weight.shape == hidden.shape[1:], (weight.shape, hidden.shape)
    assert weight.dtype == hidden.dtype, (weight.dtype, hidden.dtype)
    if hidden.is_cpu:
        return _by_layer_norm(hidden, eps) * weight
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the normalised sum; all [num_tokens, size]."""
    assert delta.shape == residual.shape, (delta.shape, residual.shape)
    residual.add_(delta)
    return rms_norm(residual, weight, eps)


def _by_layer_norm(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise [x, -x], whose mean is 0 and whose variance is the mean square of x; return the half of x.

    On CPUs torch's layer norm is one operator, its RMS norm eight: 19 instead of 39 us with cold caches for one row of
    576, 61 times per step of the 135M model.
    """
    mirrored = torch.cat((hidden, -hidden), dim=1)
    normed = functional.layer_norm(mirrored, mirrored.shape[1:], eps=eps)
    return normed[:, : hidden.shape[1]]
