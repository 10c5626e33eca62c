"""Logprobs that a runner without a model reports: a function of the token alone, in numbers that survive fp32."""

from common.messages.logprobs import TokenLogprobs
from common.scheduling.plan import Chunk


def likelihood(token: int) -> TokenLogprobs:
    """Return the logprobs of a token."""
    return TokenLogprobs(-float(token), ((token, -float(token)),))


def prompt_likelihoods(chunk: Chunk) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs of the prompt's tokens behind those of a chunk."""
    sequence = chunk.sequence
    end = min(chunk.start + chunk.length, sequence.num_prompt - 1)
    return tuple(map(likelihood, sequence.token_ids[chunk.start + 1 : end + 1]))
