"""The gated activation in plain torch."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` [num_tokens, size] for `gate_up` [num_tokens, 2 * size], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
