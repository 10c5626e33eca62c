"""What changes logits before a token is chosen: penalties for earlier tokens and tokens that are still forbidden."""

from collections.abc import Iterable, Sequence

import torch

from kernels.sampling.row import SamplingRow


def adjust_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return `logits` [num_rows, vocab] with every row's penalties and prohibitions; a copy if any row has some."""
    touched = [index for index, row in enumerate(rows) if row.is_penalised or row.must_continue]
    if not touched:
        return logits
    adjusted = logits.clone()
    for index in touched:
        _adjust_row(adjusted[index], rows[index])
    return adjusted


def _adjust_row(logits: torch.Tensor, row: SamplingRow) -> None:
    controls = row.controls
    if controls.repetition_penalty != 1.0:
        _penalise_repetition(logits, row.token_ids, controls.repetition_penalty)
    if controls.presence_penalty or controls.frequency_penalty:
        generated = row.token_ids[row.num_prompt :]
        _penalise_generated(logits, generated, controls.presence_penalty, controls.frequency_penalty)
    if row.must_continue:
        # An id outside the vocabulary can never be sampled; as an index it would hit another row.
        _forbid(logits, (token for token in controls.stop_ids if 0 <= token < len(logits)))


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
