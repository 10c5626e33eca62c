"""From the client's wishes and the model's card to `SamplingParams`: defaults, limits, stop ids, seed."""

import secrets

from common.errors import ContextLengthExceeded, InvalidRequest
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams
from gateway.schemas.sampling import SamplingFields
from gateway.validation import ChatPrompt, ValidRequest

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI default of `/v1/completions`; not clamped when the prompt leaves less room, but refused."""


def random_seed() -> int:
    """Return a seed for a request that names none, so that every later attempt samples alike."""
    return secrets.randbits(63)


def settle_sampling(request: ValidRequest, card: ModelCard, num_prompt_tokens: int, seed: int) -> SamplingParams:
    """Return what the workers obey; `seed` is taken if the client gave none.

    Raises `ContextLengthExceeded` if prompt and answer do not fit, `InvalidRequest` for ids outside the vocabulary.
    """
    fields = request.sampling
    max_tokens = _max_tokens(request, card, num_prompt_tokens)
    return SamplingParams(
        seed=seed if fields.seed is None else fields.seed,
        max_tokens=max_tokens,
        temperature=_or(fields.temperature, card.default_temperature),
        top_p=_or(fields.top_p, card.default_top_p),
        top_k=_top_k(fields, card),
        min_p=_or(fields.min_p, 0.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        stop_ids=_stop_ids(fields, card),
        min_tokens=_min_tokens(fields, max_tokens),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ValidRequest, card: ModelCard, num_prompt_tokens: int) -> int:
    room = card.max_context - num_prompt_tokens
    default = max(room, 1) if isinstance(request.prompt, ChatPrompt) else DEFAULT_COMPLETION_TOKENS
    max_tokens = default if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(num_prompt_tokens, max_tokens, card.max_context, param=request.prompt.param)
    return max_tokens


def _top_k(fields: SamplingFields, card: ModelCard) -> int:
    top_k = card.default_top_k if fields.top_k is None else fields.top_k
    return top_k if 0 < top_k < card.vocab_size else 0


def _stop_ids(fields: SamplingFields, card: ModelCard) -> tuple[int, ...]:
    chosen = fields.stop_token_ids or []
    if not all(0 <= token_id < card.vocab_size for token_id in chosen):
        raise InvalidRequest(
            f"`stop_token_ids` must lie in 0..{card.vocab_size - 1}, the model's vocabulary.", param="stop_token_ids"
        )
    ends = () if fields.ignore_eos else card.eos_ids
    return tuple(sorted({*ends, *chosen}))


def _min_tokens(fields: SamplingFields, max_tokens: int) -> int:
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` ({min_tokens}) must not exceed the token limit ({max_tokens}).", param="min_tokens"
        )
    return min_tokens
