"""Launcher of sampling: the native kernel for logits in the CPU's memory where it is built, else torch's operators.

A row's token depends on nothing but its own logits, parameters, history and position: rows are reduced one by one in
fp64, and randomness is a function of (seed, choice, position).
"""

import enum
import math
from collections.abc import Sequence

import torch

from kernels.native.library import Library, native_library
from kernels.sampling import native
from kernels.sampling.candidates import candidates
from kernels.sampling.greedy import best_tokens
from kernels.sampling.logits import adjust_logits
from kernels.sampling.row import SamplingRow
from kernels.sampling.uniform import uniform


class NoToken(enum.Enum):
    """Why a row has no token."""

    INVALID = enum.auto()
    """The model's fault: a logit is NaN or +inf, or all are -inf."""
    VIOLATED = enum.auto()
    """The model's logits are good, but what the row demands leaves no token."""


_NO_TOKENS = {native.INVALID: NoToken.INVALID, native.VIOLATED: NoToken.VIOLATED}


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | NoToken]:
    """Return one token per row of `logits` [num_rows, vocab] fp32, which stays as it is.

    Greedy rows take the lowest id of equal maxima.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.ndim == 2, logits.shape
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    library = native_library() if logits.is_cpu else None
    if library is None:
        return sample_by_torch(logits, rows)
    return sample_natively(library, logits, rows)


def sample_natively(
    library: Library, logits: torch.Tensor, rows: Sequence[SamplingRow], num_threads: int | None = None
) -> list[int | NoToken]:
    """Return what `sample` returns, for logits in the CPU's memory; `num_threads` None: as many as torch uses."""
    tokens = native.choose(library, logits, rows, num_threads)
    return [_NO_TOKENS.get(token, token) for token in tokens]


def sample_by_torch(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | NoToken]:
    """Return what `sample` returns, on any device."""
    adjusted = adjust_logits(logits, rows)
    maxima, best = best_tokens(adjusted)
    raw_maxima = maxima if adjusted is logits else logits.amax(dim=-1)
    chosen: list[int | NoToken] = []
    per_row = zip(rows, best.tolist(), maxima.tolist(), raw_maxima.tolist(), strict=True)
    for index, (row, token, maximum, raw_maximum) in enumerate(per_row):
        if not math.isfinite(raw_maximum):
            chosen.append(NoToken.INVALID)
        elif not math.isfinite(maximum):
            chosen.append(NoToken.VIOLATED)
        else:
            chosen.append(_draw(adjusted[index], row) if row.controls.temperature > 0.0 else token)
    return chosen


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    """Invert the cumulative distribution of the candidates, in order of their ids."""
    pool = candidates(logits, row.controls)
    cumulative = pool.weights.cumsum(0)
    total = float(cumulative[-1])
    # Rounding may lift the product to the total, which no candidate exceeds.
    target = min(uniform(row.controls.seed, row.choice, row.position) * total, math.nextafter(total, 0.0))
    index = int(torch.searchsorted(cumulative, target, right=True))
    return index if pool.ids is None else int(pool.ids[index])
