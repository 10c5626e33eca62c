"""How likely a token was, and what else could have been there."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's raw logits.

    `logprob` belongs to the token itself; `top` holds the most likely (token id, logprob), likeliest first, equal ones
    by id. An impossible token has -inf.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
