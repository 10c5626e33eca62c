"""From the client's wishes and the model's card to `SamplingParams`: defaults, limits, stop ids, seed."""

import secrets

from common.errors import ContextLengthExceeded, InvalidRequest
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams
from gateway.schemas.sampling import MAX_BIASED_TOKENS, DrawingFields
from gateway.validation import AnswerForm, ChatPrompt, ValidRequest

DEFAULT_COMPLETION_TOKENS = 16
"""The OpenAI default of `/v1/completions`; not clamped when the prompt leaves less room, but refused."""


HIDDEN_TOKENS = 1
"""A request for nothing but its own prompt generates this many tokens that nobody sees: workers compute a prompt to
sample from it."""


def random_seed() -> int:
    """Return a seed for a request that names none, so that every later attempt samples alike."""
    return secrets.randbits(63)


def settle_sampling(
    request: ValidRequest, card: ModelCard, num_prompt_tokens: int, seed: int, grammar: str | None = None
) -> SamplingParams:
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
        stop_ids=_stop_ids(fields, card, grammar),
        min_tokens=_min_tokens(fields, max_tokens, grammar),
        logit_bias=_logit_bias(fields, card),
        num_logprobs=_num_logprobs(request.form),
        num_prompt_logprobs=request.form.num_logprobs if request.form.echoes else None,
        grammar=grammar,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ValidRequest, card: ModelCard, num_prompt_tokens: int) -> int:
    room = card.max_context - num_prompt_tokens
    prompt = request.prompts[0]  # all are of one kind
    default = max(room, 1) if isinstance(prompt, ChatPrompt) else DEFAULT_COMPLETION_TOKENS
    wanted = default if request.max_tokens is None else request.max_tokens
    max_tokens = HIDDEN_TOKENS if request.form.hides_tokens else wanted
    if max_tokens > room:
        raise ContextLengthExceeded(num_prompt_tokens, max_tokens, card.max_context, param=prompt.param)
    return max_tokens


def _top_k(fields: DrawingFields, card: ModelCard) -> int:
    top_k = card.default_top_k if fields.top_k is None else fields.top_k
    return top_k if 0 < top_k < card.vocab_size else 0


def _stop_ids(fields: DrawingFields, card: ModelCard, grammar: str | None) -> tuple[int, ...]:
    """Where a grammar is complete nothing may follow but the end, whether the client wanted to ignore it or not."""
    chosen = fields.stop_token_ids or []
    if not all(0 <= token_id < card.vocab_size for token_id in chosen):
        raise InvalidRequest(
            f"`stop_token_ids` must lie in 0..{card.vocab_size - 1}, the model's vocabulary.", param="stop_token_ids"
        )
    ends = () if fields.ignore_eos and grammar is None else card.eos_ids
    return tuple(sorted({*ends, *chosen}))


def _logit_bias(fields: DrawingFields, card: ModelCard) -> tuple[tuple[int, float], ...]:
    bias = fields.logit_bias or {}
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"`logit_bias` may name at most {MAX_BIASED_TOKENS} tokens.", param="logit_bias")
    if not all(0 <= token_id < card.vocab_size for token_id in bias):
        raise InvalidRequest(
            f"`logit_bias` must name token ids in 0..{card.vocab_size - 1}, the model's vocabulary.", param="logit_bias"
        )
    return tuple(sorted((token_id, addend) for token_id, addend in bias.items() if addend))


def _num_logprobs(form: AnswerForm) -> int | None:
    """The best answers are found by their logprobs, whether the client sees them or not."""
    if form.num_logprobs is None and form.num_generated > form.num_choices:
        return 0
    return form.num_logprobs


def _min_tokens(fields: DrawingFields, max_tokens: int, grammar: str | None) -> int:
    min_tokens = fields.min_tokens or 0
    if min_tokens and grammar is not None:
        raise InvalidRequest("`min_tokens` has no meaning where a grammar says when to end.", param="min_tokens")
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` ({min_tokens}) must not exceed the token limit ({max_tokens}).", param="min_tokens"
        )
    return min_tokens
