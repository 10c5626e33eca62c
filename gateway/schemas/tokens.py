"""`/tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

import msgspec

from gateway.schemas.chat import ChatMessage
from gateway.schemas.tools import Tools


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either a text (`prompt`) or a conversation (`messages`, `tools`, `chat_template_kwargs`).

    `add_special_tokens` false leaves out the BOS that the model wants before a text; a chat template writes its own.
    """

    model: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, frozen=True):
    """The ids. `max_model_len` is the model's context; `token_strs` are the ids' names in the vocabulary, if wanted."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """Ids of the model's vocabulary."""

    model: str
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """Their text, special tokens included."""

    prompt: str
