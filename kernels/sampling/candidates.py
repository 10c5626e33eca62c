"""Which tokens may be drawn and with what weight: temperature, then top-k, renormalise, top-p, min-p.

Rank is by logit descending, then token id ascending. The vocabulary is never sorted as a whole unless nearly all of it
is wanted: the threshold of the k best comes from a selection, and only what reaches it is sorted.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.sampling.row import SamplingControls

_NUCLEUS_SIZES = (256, 4096)
"""Ranks tried before all are sorted. Selecting 256 of 49152 takes 0.1 ms, 4096 0.8 ms, sorting them 4 ms."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """`weights` [n] fp64, proportional to probability; `ids` [n] ascending, None if n is the whole vocabulary."""

    ids: torch.Tensor | None
    weights: torch.Tensor


def candidates(logits: torch.Tensor, controls: SamplingControls) -> Candidates:
    """Return what may be drawn from one row of `logits` [vocab]: at least its best token.

    The row's maximum must be finite and the temperature positive.
    """
    best = logits.max()
    if 0 < controls.top_k < len(logits):
        ids = best_ids(logits, controls.top_k)
    elif controls.top_p < 1.0:
        return _nucleus(logits, best, controls)
    else:
        weights = _weights(logits, best, controls.temperature)
        return Candidates(ids=None, weights=_drop_unlikely(weights, controls.min_p))
    weights = _weights(logits[ids], best, controls.temperature)
    return _cut(ids, weights, weights.sum(), controls)


def _nucleus(logits: torch.Tensor, best: torch.Tensor, controls: SamplingControls) -> Candidates:
    """Apply top-p to the whole vocabulary, ranking no more of it than the nucleus needs."""
    mass = _weights(logits, best, controls.temperature).sum()
    for size in (*_NUCLEUS_SIZES, len(logits)):
        ids = best_ids(logits, min(size, len(logits)))
        weights = _weights(logits[ids], best, controls.temperature)
        if weights.sum() >= controls.top_p * mass:
            break
    return _cut(ids, weights, mass, controls)


def _cut(ids: torch.Tensor, weights: torch.Tensor, mass: torch.Tensor, controls: SamplingControls) -> Candidates:
    """Apply top-p and min-p to ranked candidates: keep while those ranked before hold less than top-p of `mass`."""
    before = functional.pad(weights.cumsum(0)[:-1], (1, 0))
    keep = (before < controls.top_p * mass) & (weights >= controls.min_p)
    keep[0] = True
    ids, order = ids[keep].sort()
    return Candidates(ids=ids, weights=weights[keep][order])


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the `count` best tokens in rank order."""
    threshold = logits.topk(count).values[-1]
    ids = (logits >= threshold).nonzero().squeeze(1)  # ascending, so a stable sort leaves ties in order of id
    return ids[logits[ids].sort(descending=True, stable=True).indices[:count]]


def _weights(logits: torch.Tensor, best: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return probabilities relative to the best token's, in fp64 so that sums do not depend on what was filtered."""
    return logits.double().sub_(best).div_(temperature).exp_()


def _drop_unlikely(weights: torch.Tensor, min_p: float) -> torch.Tensor:
    """Zero the weights below `min_p`; the best token's weight is 1."""
    return weights if min_p <= 0.0 else weights.masked_fill_(weights < min_p, 0.0)
