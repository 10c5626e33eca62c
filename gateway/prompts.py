"""From validated prompts to token ids: chat template, tokenizer, vocabulary check."""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.messages import TemplateMessage
from gateway.served_models import ServedModel, ServedModels
from gateway.validation import ChatPrompt, Prompt, TextPrompt, TokenPrompt

INLINE_CHARS = 2048
"""Texts that are together up to this long are tokenised on the event loop: it takes under 1 ms, about what a thread's
turn costs."""

CHARS_PER_MESSAGE = 64
"""What a message costs a template beside its text: 5 us."""

IDS_PER_CHAR = 16
"""So many ids are compared with the vocabulary in the time that a character takes to be tokenised."""


async def encode_prompts(
    prompts: Sequence[Prompt], model: ServedModel, models: ServedModels
) -> tuple[Sequence[int], ...]:
    """Return the ids of each prompt, at least one; raises `InvalidRequest` naming `messages` or `prompt`."""
    if sum([_cost(prompt, model) for prompt in prompts]) <= INLINE_CHARS:
        return _encode_all(prompts, model)
    return await models.run(lambda: _encode_all(prompts, model))


def _cost(prompt: Prompt, model: ServedModel) -> int:
    match prompt:
        case ChatPrompt(messages, tools=None) if model.template is not None and model.template.is_quick:
            return sum([_cost_of_message(message) for message in messages])
        case ChatPrompt():
            return INLINE_CHARS + 1  # a template may take long over a short conversation
        case TextPrompt(text):
            return len(text)
        case TokenPrompt(ids):
            return len(ids) // IDS_PER_CHAR


def _cost_of_message(message: TemplateMessage) -> int:
    is_plain = all(isinstance(value, str) for value in message.values())
    return CHARS_PER_MESSAGE + sum(map(len, message.values())) if is_plain else INLINE_CHARS + 1


def _encode_all(prompts: Sequence[Prompt], model: ServedModel) -> tuple[Sequence[int], ...]:
    return tuple(_encode(prompt, model, index, len(prompts)) for index, prompt in enumerate(prompts))


def _encode(prompt: Prompt, model: ServedModel, index: int, num_prompts: int) -> Sequence[int]:
    name = prompt.param if num_prompts == 1 else f"{prompt.param}[{index}]"
    match prompt:
        case ChatPrompt():
            ids: Sequence[int] = encode_chat(prompt, model)
        case TextPrompt(text):
            ids = model.tokenizer.encode_text(text)
        case TokenPrompt(ids):
            check_vocabulary(ids, model.card.vocab_size, name, "prompt")
    if not ids:
        raise InvalidRequest(f"`{name}` is empty: it has no tokens.", param=prompt.param)
    return ids


def encode_chat(prompt: ChatPrompt, model: ServedModel) -> list[int]:
    """Return the ids of a conversation; raises `InvalidRequest` if the model has no chat template, or it refuses."""
    if model.template is None:
        raise InvalidRequest(
            f"The model '{model.card.model}' has no chat template; use /v1/completions.",
            param="model",
            code="no_chat_template",
        )
    return model.tokenizer.encode_chat(model.template.render(prompt.messages, prompt.template_kwargs, prompt.tools))


def check_vocabulary(ids: Sequence[int], vocab_size: int, name: str, param: str) -> None:
    """Every id with a row in the embedding table is taken, also rows that the tokenizer has no text for; raises
    `InvalidRequest` for others."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequest(
            f"`{name}` holds token ids outside 0..{vocab_size - 1}, the model's vocabulary.", param=param
        )
