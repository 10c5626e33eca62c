"""What is wrong with token ids that a peer names: a table would be read behind its end, in the middle of a batch."""

from collections.abc import Sequence

from common.messages.sampling import SamplingParams

MAX_TOP_LOGPROBS = 20
"""OpenAI's bound of `top_logprobs`."""


def objection_to_ids(ids: Sequence[int], vocab_size: int) -> str | None:
    """Return why these are no ids of a vocabulary of `vocab_size` tokens, None if they are."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    outside = next(token for token in ids if not 0 <= token < vocab_size)
    return f"token id {outside} is outside the vocabulary of {vocab_size}"


def objection_to_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    """Return why nobody can draw a token like that, None if it can be done."""
    for count in (sampling.num_logprobs, sampling.num_prompt_logprobs):
        if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            return f"{count} logprobs per token are not 0 to {MAX_TOP_LOGPROBS}"
    return objection_to_ids((*sampling.stop_ids, *(token for token, _ in sampling.logit_bias)), vocab_size)
