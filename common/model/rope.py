"""Rotary embedding of a model: frequencies from its config, angles from positions. Everything in fp32."""

import math
from typing import assert_never

import torch

from common.model.config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines of token positions; immutable."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [num_tokens, head_dim / 2] fp32 for `positions` [num_tokens]."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        return angles.cos(), angles.sin()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return radians per position [head_dim / 2] fp32, slowed down as `rope.kind` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case _:
            assert_never(rope.kind)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow down only the waves that do not turn often within the original context (Llama 3.1 model card).

    Waves that turn at least `high_freq_factor` times keep their frequency, those below `low_freq_factor` turns are
    divided by `factor`, between them it is a blend, linear in the number of turns.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
