"""How close a kernel must be to its reference, by dtype."""

import torch

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
"""(relative, absolute): a few units in the last place of a number near 1."""


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal shapes, dtypes and, within the dtype's tolerance, numbers."""
    relative, absolute = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)
