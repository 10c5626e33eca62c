"""Counter-based randomness: the uniform number of (seed, choice, position), the same on every machine and device.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014);
each key is added to the state, spread by the golden-ratio increment, and mixed.
"""

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_FRACTION_BITS = 53


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a multiple of 2**-53 in [0, 1); keys are int64, negative ones are taken modulo 2**64."""
    state = 0
    for key in (seed, choice, position):
        state = _mix((state + (key & _MASK) + _INCREMENT) & _MASK)
    return (state >> (64 - _FRACTION_BITS)) * 2.0**-_FRACTION_BITS


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
