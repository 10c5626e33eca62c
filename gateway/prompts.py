"""From a validated prompt to token ids: chat template, tokenizer, vocabulary check."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.served_models import ServedModel, ServedModels
from gateway.validation import ChatPrompt, Prompt, TextPrompt, TokenPrompt

INLINE_CHARS = 2048
"""A text up to this long is tokenised on the event loop: it takes under 1 ms, about what a thread's turn costs."""


async def encode_prompt(prompt: Prompt, model: ServedModel, models: ServedModels) -> Sequence[int]:
    """Return the prompt's ids, at least one; raises `InvalidRequest` naming `messages` or `prompt`."""
    match prompt:
        case ChatPrompt():
            ids = await models.run(lambda: _encode_chat(prompt, model))
        case TextPrompt(text) if len(text) <= INLINE_CHARS:
            ids = model.tokenizer.encode_text(text)
        case TextPrompt(text):
            ids = await models.run(lambda: model.tokenizer.encode_text(text))
        case TokenPrompt(ids):
            _check_vocabulary(ids, model.card.vocab_size)
    if not ids:
        raise InvalidRequest(f"`{prompt.param}` is empty: it has no tokens.", param=prompt.param)
    return ids


def _encode_chat(prompt: ChatPrompt, model: ServedModel) -> list[int]:
    if model.template is None:
        raise InvalidRequest(
            f"The model '{model.card.model}' has no chat template; use /v1/completions.",
            param="model",
            code="no_chat_template",
        )
    return model.tokenizer.encode_chat(model.template.render(prompt.messages, prompt.template_kwargs))


def _check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Every id with a row in the embedding table is taken, also rows that the tokenizer has no text for."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequest(
            f"`prompt` holds token ids outside 0..{vocab_size - 1}, the model's vocabulary.", param="prompt"
        )
