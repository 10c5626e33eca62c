"""Linears in plain torch."""

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool) -> torch.Tensor:
    """Return `x @ weight.T + bias` in fp64; if gated, `silu` of its first half times the second."""
    sums = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not is_gated:
        return sums
    gate, up = sums.chunk(2, dim=1)
    return functional.silu(gate) * up
