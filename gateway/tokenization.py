"""Texts and conversations to token ids and back, for clients that only want to count or look.

Long ones take their time in a thread, like the prompts of answers.
"""

from dataclasses import dataclass

import msgspec

from common.errors import InvalidRequest
from common.messages.ids import ModelName
from gateway.body import decode_json
from gateway.messages import template_messages
from gateway.prompts import check_vocabulary, encode_chat
from gateway.schemas.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from gateway.served_models import ServedModel
from gateway.template_kwargs import allowed_kwargs
from gateway.tools.request import tool_use
from gateway.unsupported import TOKENIZE_REFUSED, FieldPolicy
from gateway.validation import ChatPrompt, TextPrompt, fields_of

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_tokenize_policy = FieldPolicy(frozenset(TokenizeRequest.__struct_fields__), TOKENIZE_REFUSED)
_detokenize_policy = FieldPolicy(frozenset(DetokenizeRequest.__struct_fields__))


@dataclass(frozen=True, slots=True)
class TextToTokens:
    """What is wanted as ids."""

    model: ModelName
    prompt: ChatPrompt | TextPrompt
    adds_bos: bool
    shows_names: bool

    def run(self, model: ServedModel) -> Tokenized:
        """Return the ids; raises `InvalidRequest`."""
        ids = self._ids(model)
        names = model.tokenizer.names_of(ids) if self.shows_names else None
        return Tokenized(len(ids), model.card.max_context, ids, names)

    def _ids(self, model: ServedModel) -> list[int]:
        match self.prompt:
            case ChatPrompt():
                return encode_chat(self.prompt, model)
            case TextPrompt(text):
                return model.tokenizer.encode_text(text, adds_bos=self.adds_bos)


@dataclass(frozen=True, slots=True)
class TokensToText:
    """What is wanted as text."""

    model: ModelName
    ids: list[int]

    def run(self, model: ServedModel) -> Detokenized:
        """Return the text; raises `InvalidRequest` for ids outside the vocabulary."""
        check_vocabulary(self.ids, model.card.vocab_size, "tokens", "tokens")
        return Detokenized(model.tokenizer.text_of(self.ids))


def parse_tokenize(body: bytes) -> TextToTokens:
    """Return what `body` wants as ids; raises `InvalidRequest` naming the field."""
    fields = fields_of(body, _tokenize_policy)
    request = decode_json(_tokenize_decoder, body)
    return TextToTokens(
        model=ModelName(request.model),
        prompt=_prompt(request, len(memoryview(fields["tools"])) if "tools" in fields else 0),
        adds_bos=request.add_special_tokens is not False,
        shows_names=bool(request.return_token_strs),
    )


def parse_detokenize(body: bytes) -> TokensToText:
    """Return what `body` wants as text; raises `InvalidRequest` naming the field."""
    fields_of(body, _detokenize_policy)
    request = decode_json(_detokenize_decoder, body)
    return TokensToText(ModelName(request.model), request.tokens)


def _prompt(request: TokenizeRequest, num_tool_bytes: int) -> ChatPrompt | TextPrompt:
    if request.messages is None:
        return _text_prompt(request)
    if request.prompt is not None:
        raise InvalidRequest("Send either `prompt` or `messages`.", param="messages")
    if request.add_special_tokens:
        raise InvalidRequest(
            "`add_special_tokens` cannot be true: the chat template writes them.",
            param="add_special_tokens",
            code="unsupported_parameter",
        )
    tools = tool_use(request.tools, None, None, num_tool_bytes)
    kwargs = allowed_kwargs(request.chat_template_kwargs or {})
    return ChatPrompt(template_messages(request.messages), kwargs, tools)


def _text_prompt(request: TokenizeRequest) -> TextPrompt:
    if request.prompt is None:
        raise InvalidRequest("`prompt` or `messages` is required.", param="prompt")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name):
            raise InvalidRequest(f"`{name}` has no meaning without messages.", param=name)
    return TextPrompt(request.prompt)
