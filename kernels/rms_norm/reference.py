"""RMS normalisation in plain torch, one step per line of its definition."""

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `hidden` [num_tokens, size] divided by its root mean square and scaled by `weight` [size]."""
    wide = hidden.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(hidden.dtype) * weight


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `residual` in place and return the normalised sum; all [num_tokens, size]."""
    residual += delta
    return rms_norm(residual, weight, eps)
