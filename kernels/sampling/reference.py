"""Sampling probabilities in plain torch: each step masks the whole vocabulary and renormalises, nothing is clever."""

import torch

from kernels.sampling.row import SamplingControls, SamplingRow


def adjusted(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Return `logits` [vocab] fp32 after bias, penalties and prohibitions, token by token."""
    result = logits.clone()
    controls = row.controls
    generated = list(row.token_ids[row.num_prompt :])
    for token, addend in controls.logit_bias:
        result[token] += addend
    for token in set(row.token_ids):
        value = float(result[token])
        result[token] = value * controls.repetition_penalty if value < 0 else value / controls.repetition_penalty
    for token in set(generated):
        result[token] -= controls.presence_penalty + controls.frequency_penalty * generated.count(token)
    if row.position < controls.min_tokens:
        result[list(controls.stop_ids)] = -torch.inf
    if row.allowed is not None:
        words = row.allowed.tolist()
        for token in range(len(result)):
            if token // 32 >= len(words) or not words[token // 32] >> token % 32 & 1:
                result[token] = -torch.inf
    return result


def logprobs(logits: torch.Tensor, token: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the logprob of `token` and the `num_top` likeliest tokens of `logits` [vocab] with theirs."""
    every = logits.double().log_softmax(-1).tolist()
    ranked = sorted(range(len(every)), key=lambda each: (-float(logits[each]), each))
    return every[token], [(each, every[each]) for each in ranked[:num_top]]


def probabilities(logits: torch.Tensor, controls: SamplingControls) -> torch.Tensor:
    """Return the distribution [vocab] fp64 that a token is drawn from, given adjusted `logits` [vocab]."""
    # Descending by logit; a stable sort keeps equal ones in order of id.
    order = logits.sort(descending=True, stable=True).indices
    ranked = (logits.double()[order] / controls.temperature).softmax(-1)
    if controls.top_k > 0:
        ranked[controls.top_k :] = 0.0
        ranked = ranked / ranked.sum()
    before = torch.cat((torch.zeros(1, dtype=torch.float64), ranked.cumsum(0)[:-1]))
    if controls.top_p < 1.0:
        ranked[1:] = torch.where(before[1:] < controls.top_p, ranked[1:], 0.0)
        ranked = ranked / ranked.sum()
    ranked = torch.where(ranked >= controls.min_p * ranked[0], ranked, 0.0)
    return torch.zeros_like(ranked).scatter_(0, order, ranked / ranked.sum())
