"""Launcher of the native CPU kernel, with the signature of `op.py` after the library."""

import torch

from kernels.native.arguments import address, count, dtype_number
from kernels.native.library import Library


def silu_mul(library: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [num_tokens, size] for `gate_up` [num_tokens, 2 * size], gate first."""
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(num_tokens, size, dtype=gate_up.dtype)
    library.functions.tandem_silu_mul(
        dtype_number(gate_up.dtype), address(gate_up), count(num_tokens), count(size), address(output)
    )
    return output
