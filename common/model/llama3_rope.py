"""The llama3 rule for stretching rotary frequencies, and its inverse.

Formula: `rope_type: llama3` of Hugging Face configs. Wavelengths shorter than `original / high` stay, those longer than
`original / low` are stretched by `factor`, and the inverse is interpolated linearly in between.
"""

import math
from collections.abc import Sequence

from common.model.config import RopeConfig

_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_MAX_POSITION = 8192
_TOLERANCE = 1e-3


def llama3_divisors(rope: RopeConfig, num_frequencies: int) -> list[float]:
    """Return by how much each of the `num_frequencies` (head_dim / 2) plain frequencies is divided."""
    return [_divisor(rope, rope.theta ** (-index / num_frequencies)) for index in range(num_frequencies)]


def recover_llama3(theta: float, divisors: Sequence[float]) -> RopeConfig | None:
    """Return the llama3 parameters behind `divisors`, or None if no published Llama 3 has them.

    GGUF files keep the divisors alone. All published models agree in every parameter but `factor`, which is the
    largest divisor.
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


def _divisor(rope: RopeConfig, frequency: float) -> float:
    turns = rope.original_max_position * frequency / (2 * math.pi)  # in the original context
    if turns > rope.high_freq_factor:
        return 1.0
    if turns < rope.low_freq_factor:
        return rope.factor
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)
