"""Logprobs under the raw logits: of one token per row, and of the likeliest ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.native.library import native_library
from kernels.sampling import native
from kernels.sampling.candidates import best_ids


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms, fp64. `of_tokens` [num_rows]; `top_ids` int64 and `of_top` [num_rows, num_top], likeliest
    first, equal logits by id."""

    of_tokens: torch.Tensor
    top_ids: torch.Tensor
    of_top: torch.Tensor


def row_logprobs(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> RowLogprobs:
    """Return the logprobs of `tokens`, one per row of `logits` [num_rows, vocab] fp32, and of the `num_top` best.

    A logit of -inf gives -inf; the maximum of every row must be finite. No distribution is stored: the peak is one
    more tensor like `logits`.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[0] == len(tokens), (logits.shape, len(tokens))
    library = native_library() if logits.is_cpu else None
    if library is None:
        return row_logprobs_by_torch(logits, tokens, num_top)
    return RowLogprobs(*native.logprobs(library, logits, tokens, min(num_top, logits.shape[1])))


def row_logprobs_by_torch(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> RowLogprobs:
    """Return what `row_logprobs` returns, on any device."""
    maxima = logits.amax(dim=-1, keepdim=True)
    # Summed in fp64: the terms of 49,152 tokens are far apart in size.
    log_sums = (logits - maxima).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64).log_()
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    top_ids = _top_ids(logits, min(num_top, logits.shape[1]))
    return RowLogprobs(
        of_tokens=(logits.gather(1, chosen) - maxima - log_sums).squeeze(1),
        top_ids=top_ids,
        of_top=logits.gather(1, top_ids) - maxima - log_sums,
    )


def _top_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [num_rows, count]: each row's best, equal ones by id."""
    if not count or not len(logits):
        return torch.empty(len(logits), count, dtype=torch.int64, device=logits.device)
    selected = logits.topk(count, dim=-1)
    ids = selected.indices.sort(dim=-1).values  # so that a stable sort leaves equal ones in order of id
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    # Where more tokens than wanted reach the last place, the selection took any of the equal ones.
    is_tied = (logits >= selected.values[:, -1:]).sum(dim=-1) > count
    for row in is_tied.nonzero().flatten().tolist():
        ids[row] = best_ids(logits[row], count)
    return ids
