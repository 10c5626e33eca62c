"""The edge: bytes of a request body in, a `ValidRequest` out, or a `RequestError` that names the parameter.

What needs the model's card (vocabulary, context length, defaults) is settled later, by `prompts` and `sampling`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.errors import InvalidRequest
from common.messages.ids import ModelName
from gateway.answer_parser import MakeParser
from gateway.body import decode_json
from gateway.messages import TemplateMessage, template_messages
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import SamplingFields
from gateway.served_models import ServedModel, ServedModels
from gateway.tools import refuse_tools
from gateway.unsupported import CHAT_REFUSED, COMPLETION_REFUSED, FieldPolicy

logger = logging.getLogger(__name__)

TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""What a request may tell the chat template; everything else in there could replace what the server decides."""

MAX_NAMES_IN_LOG = 20
MAX_NAME_CHARS_IN_LOG = 64


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the chat template."""

    messages: list[TemplateMessage]
    template_kwargs: Mapping[str, bool | str]
    param = "messages"
    operation = "chat"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to continue."""

    text: str
    param = "prompt"
    operation = "text_completion"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, not yet compared with the vocabulary."""

    ids: list[int]
    param = "prompt"
    operation = "text_completion"


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class GrammarSpec(Protocol):
    """What the answer must match, as the client said it."""

    async def compile(self, model: ServedModel, models: ServedModels) -> str:
        """Return the grammar in llguidance's JSON form; raises `InvalidRequest` naming the field it came in."""


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request as far as it can be checked without its model. `max_tokens` None: the endpoint's default.

    `make_parser` None: the answer is plain text. `grammar` None: any text will do.
    """

    model: ModelName
    prompt: Prompt
    sampling: SamplingFields
    max_tokens: int | None
    stops: tuple[str, ...]
    streams: bool
    includes_usage: bool
    cache_salt: str
    make_parser: MakeParser | None = None
    grammar: GrammarSpec | None = None


_Fields = dict[str, msgspec.Raw]
_fields_decoder = msgspec.json.Decoder(_Fields)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)

_CHAT_POLICY = FieldPolicy(frozenset(ChatRequest.__struct_fields__) | {"tools", "tool_choice"}, CHAT_REFUSED)
_COMPLETION_POLICY = FieldPolicy(frozenset(CompletionRequest.__struct_fields__), COMPLETION_REFUSED)


def parse_chat(body: bytes) -> ValidRequest:
    """Return the chat completion request in `body`."""
    fields = _fields_of(body, _CHAT_POLICY)
    refuse_tools(fields)
    request = decode_json(_chat_decoder, body)
    prompt = ChatPrompt(template_messages(request.messages), _template_kwargs(request.chat_template_kwargs or {}))
    return _valid(request, prompt, _max_tokens(request.max_tokens, request.max_completion_tokens))


def parse_completion(body: bytes) -> ValidRequest:
    """Return the text completion request in `body`."""
    _fields_of(body, _COMPLETION_POLICY)
    request = decode_json(_completion_decoder, body)
    return _valid(request, _text_or_tokens(request.prompt), request.max_tokens)


def _fields_of(body: bytes, policy: FieldPolicy) -> _Fields:
    fields = decode_json(_fields_decoder, body)
    policy.refuse(fields)
    unknown = policy.unknown(fields)
    if unknown:
        names = [name[:MAX_NAME_CHARS_IN_LOG] for name in unknown[:MAX_NAMES_IN_LOG]]
        logger.warning("unknown fields ignored", extra={"warnings": names})
    return fields


def _valid(request: ChatRequest | CompletionRequest, prompt: Prompt, max_tokens: int | None) -> ValidRequest:
    if (request.n or 1) != 1:
        raise InvalidRequest("`n` above 1 is not supported yet.", param="n", code="unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
    return ValidRequest(
        model=ModelName(request.model),
        prompt=prompt,
        sampling=request,
        max_tokens=max_tokens,
        stops=_stops(request.stop),
        streams=bool(request.stream),
        includes_usage=bool(request.stream_options and request.stream_options.include_usage),
        cache_salt=request.cache_salt or "",
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _max_tokens(old_name: int | None, new_name: int | None) -> int | None:
    if old_name is not None and new_name is not None and old_name != new_name:
        raise InvalidRequest(
            f"`max_tokens` ({old_name}) and `max_completion_tokens` ({new_name}) differ; send one of them.",
            param="max_completion_tokens",
        )
    return old_name if new_name is None else new_name


def _template_kwargs(kwargs: Mapping[str, object]) -> dict[str, bool | str]:
    allowed: dict[str, bool | str] = {}
    for name, value in kwargs.items():
        if name not in TEMPLATE_KWARGS:
            raise InvalidRequest(
                f"`chat_template_kwargs` may only hold {', '.join(sorted(TEMPLATE_KWARGS))}.",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
        if isinstance(value, bool | str):
            allowed[name] = value
        elif value is not None:
            raise InvalidRequest(
                f"`chat_template_kwargs.{name}` must be a boolean or a string.", param=f"chat_template_kwargs.{name}"
            )
    return allowed


def _text_or_tokens(prompt: str | list[str | int | list[int]]) -> TextPrompt | TokenPrompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return TokenPrompt(ids)
    if ids or len({type(item) for item in prompt}) > 1:
        raise InvalidRequest("`prompt` must not mix texts, token ids and lists.", param="prompt")
    return _only_one(prompt)


def _only_one(prompts: list[str | int | list[int]]) -> TextPrompt | TokenPrompt:
    match prompts:
        case [str(text)]:
            return TextPrompt(text)
        case [list(ids)]:
            return TokenPrompt(ids)
        case []:
            raise InvalidRequest("`prompt` is empty.", param="prompt")
        case _:
            raise InvalidRequest(
                f"`prompt` holds {len(prompts)} prompts; more than one is not supported yet.",
                param="prompt",
                code="unsupported_parameter",
            )
