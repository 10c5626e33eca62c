"""Launcher of the gated activation. Every device runs torch's operators today; `triton.py` is chosen here for CUDA."""

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [num_tokens, size] for `gate_up` [num_tokens, 2 * size], gate first."""
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    size = gate_up.shape[1] // 2
    return functional.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
