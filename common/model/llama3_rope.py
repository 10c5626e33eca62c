"""Recovers Llama 3's stretched rotary embedding from what GGUF files keep of it: the divisors of its frequencies."""

import math
from collections.abc import Sequence

from common.model.config import RopeConfig
from common.model.rope import inverse_frequencies

_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_MAX_POSITION = 8192
_TOLERANCE = 1e-3


def llama3_divisors(rope: RopeConfig, num_frequencies: int) -> list[float]:
    """Return by how much each of the `num_frequencies` (head_dim / 2) plain frequencies is divided."""
    head_dim = 2 * num_frequencies
    plain = inverse_frequencies(RopeConfig(rope.theta), head_dim)
    divisors: list[float] = (plain / inverse_frequencies(rope, head_dim)).tolist()
    return divisors


def recover_llama3(theta: float, divisors: Sequence[float]) -> RopeConfig | None:
    """Return the llama3 parameters behind `divisors`, or None if no published Llama 3 has them.

    All published models agree in every parameter but `factor`, which is the largest divisor.
    """
    rope = RopeConfig(
        theta,
        "llama3",
        max(divisors),
        _LOW_FREQ_FACTOR,
        _HIGH_FREQ_FACTOR,
        original_max_position=_ORIGINAL_MAX_POSITION,
    )
    expected = llama3_divisors(rope, len(divisors))
    agrees = all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(divisors, expected, strict=True))
    return rope if agrees else None
