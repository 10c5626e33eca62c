"""What changes logits before a token is chosen: bias, penalties for earlier tokens, and what is forbidden.

A row is changed within its own logits alone: an id outside the vocabulary would hit another row as an index, so it is
left out. It could never be sampled anyway.
"""

from collections.abc import Iterable, Sequence

import torch

from kernels.sampling.row import SamplingRow

_WORD_BITS = 32


def adjust_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return `logits` [num_rows, vocab] with what each row adds, penalises and forbids; a copy if any row does."""
    touched = [index for index, row in enumerate(rows) if row.is_adjusted]
    if not touched:
        return logits
    adjusted = logits.clone()
    for index in touched:
        _adjust_row(adjusted[index], rows[index])
    return adjusted


def _adjust_row(logits: torch.Tensor, row: SamplingRow) -> None:
    controls = row.controls
    if controls.logit_bias:
        _add_bias(logits, controls.logit_bias)
    if controls.repetition_penalty != 1.0:
        _penalise_repetition(logits, row.token_ids, controls.repetition_penalty)
    if controls.presence_penalty or controls.frequency_penalty:
        generated = row.token_ids[row.num_prompt :]
        _penalise_generated(logits, generated, controls.presence_penalty, controls.frequency_penalty)
    if row.must_continue:
        _forbid(logits, (token for token in controls.stop_ids if 0 <= token < len(logits)))
    if row.allowed is not None:
        _forbid_others(logits, row.allowed)


def _add_bias(logits: torch.Tensor, bias: Iterable[tuple[int, float]]) -> None:
    inside = [(token, addend) for token, addend in bias if 0 <= token < len(logits)]
    ids = torch.tensor([token for token, _ in inside], dtype=torch.int64, device=logits.device)
    addends = torch.tensor([addend for _, addend in inside], dtype=logits.dtype, device=logits.device)
    logits.index_add_(0, ids, addends)


def _penalise_repetition(logits: torch.Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Push every distinct token down once: a positive logit is divided by `penalty`, a negative one multiplied."""
    seen = torch.unique(torch.tensor(token_ids, dtype=torch.int64, device=logits.device))
    values = logits[seen]
    logits[seen] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_generated(logits: torch.Tensor, generated: Sequence[int], presence: float, frequency: float) -> None:
    """Subtract `presence` once and `frequency` per occurrence of every generated token."""
    ids = torch.tensor(generated, dtype=torch.int64, device=logits.device)
    seen, counts = torch.unique(ids, return_counts=True)
    logits[seen] -= presence + frequency * counts


def _forbid(logits: torch.Tensor, token_ids: Iterable[int]) -> None:
    logits[torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)] = -torch.inf


def _forbid_others(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Forbid what has no bit in `allowed` [num_words] int32."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    bits = (allowed.to(logits.device).unsqueeze(1) >> shifts) & 1  # [num_words, 32]
    is_forbidden = bits.flatten()[: len(logits)] == 0
    logits[: len(is_forbidden)].masked_fill_(is_forbidden, -torch.inf)
    logits[len(is_forbidden) :] = -torch.inf
