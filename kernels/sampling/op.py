"""Launcher of sampling. Every device runs torch's operators today; `triton.py` is chosen here for CUDA.

A row's token depends on nothing but its own logits, parameters, history and position: rows are reduced one by one in
fp64, and randomness is a function of (seed, choice, position).
"""

import math
from collections.abc import Sequence

import torch

from kernels.sampling.candidates import candidates
from kernels.sampling.greedy import best_tokens
from kernels.sampling.logits import adjust_logits
from kernels.sampling.row import SamplingRow
from kernels.sampling.uniform import uniform


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Return one token per row of `logits` [num_rows, vocab] fp32, which stays as it is.

    None: the row has no token to choose, because a logit is NaN or +inf or all are -inf. Greedy rows take the lowest
    id of equal maxima.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.ndim == 2, logits.shape
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    adjusted = adjust_logits(logits, rows)
    maxima, best = best_tokens(adjusted)
    is_valid = maxima.isfinite()
    if adjusted is not logits:
        is_valid &= logits.amax(dim=-1).isfinite()
    return [
        (_draw(adjusted[index], row) if row.controls.temperature > 0.0 else token) if valid else None
        for index, (row, token, valid) in enumerate(zip(rows, best.tolist(), is_valid.tolist(), strict=True))
    ]


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    """Invert the cumulative distribution of the candidates, in order of their ids."""
    pool = candidates(logits, row.controls)
    cumulative = pool.weights.cumsum(0)
    total = float(cumulative[-1])
    # Rounding may lift the product to the total, which no candidate exceeds.
    target = min(uniform(row.controls.seed, row.choice, row.position) * total, math.nextafter(total, 0.0))
    index = int(torch.searchsorted(cumulative, target, right=True))
    return index if pool.ids is None else int(pool.ids[index])
