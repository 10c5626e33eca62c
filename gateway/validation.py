"""The edge: bytes of a request body in, a `ValidRequest` out, or a `RequestError` that names the parameter.

What needs the model's card (vocabulary, context length, defaults) is settled later, by `prompts` and `sampling`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from common.errors import InvalidRequest
from common.messages.ids import ModelName
from gateway.answer_parser import MakeParser
from gateway.body import decode_json
from gateway.chat_answer import ChatAnswers
from gateway.chat_grammar import chat_grammar
from gateway.guidance.fields import requested_grammar
from gateway.messages import TemplateMessage, template_messages
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import DrawingFields, SamplingFields, StreamOptions
from gateway.served_models import ServedModel, ServedModels
from gateway.template_kwargs import template_kwargs
from gateway.tools.request import ToolUse, tool_use
from gateway.unsupported import CHAT_REFUSED, COMPLETION_REFUSED, FieldPolicy

logger = logging.getLogger(__name__)

MAX_PROMPTS = 128
"""Prompts in one request."""

MAX_CHOICES_IN_ALL = 1024
"""Answers that one request may have generated, over all its prompts."""

MAX_NAMES_IN_LOG = 20
MAX_NAME_CHARS_IN_LOG = 64


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the chat template."""

    messages: list[TemplateMessage]
    template_kwargs: Mapping[str, bool | str]
    tools: ToolUse | None = None
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

    async def compile(self, model: ServedModel, models: ServedModels, prompt_ids: Sequence[int]) -> str:
        """Return the grammar in llguidance's JSON form, for an answer to this prompt.

        Raises `InvalidRequest` naming the field it came in.
        """


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What of the answer is sent, and how.

    `num_choices` are sent per prompt, the best of `num_generated` ones. `num_logprobs` is how many alternatives are
    told beside each token, None: no logprobs. `echoes`: the prompt comes first, and so do its logprobs. `hides_tokens`:
    nothing but the prompt is wanted. `skips_special` and `shows_stop` say whether special tokens, and what ended the
    answer, are left out of the text.
    """

    streams: bool = False
    num_choices: int = 1
    num_generated: int = 1
    num_logprobs: int | None = None
    echoes: bool = False
    hides_tokens: bool = False
    shows_token_ids: bool = False
    skips_special: bool = True
    shows_stop: bool = False
    includes_usage: bool = False
    has_running_usage: bool = False
    includes_timing: bool = False


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request as far as it can be checked without its model. `max_tokens` None: the endpoint's default.

    There is at least one prompt. `make_parser` None: the answer is plain text. `grammar` None: any text will do.
    """

    model: ModelName
    prompts: tuple[Prompt, ...]
    sampling: DrawingFields
    max_tokens: int | None
    stops: tuple[str, ...]
    form: AnswerForm
    cache_salt: str = ""
    make_parser: MakeParser | None = None
    grammar: GrammarSpec | None = None


_Fields = dict[str, msgspec.Raw]
_fields_decoder = msgspec.json.Decoder(_Fields)
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)

_CHAT_POLICY = FieldPolicy(frozenset(ChatRequest.__struct_fields__), CHAT_REFUSED)
_COMPLETION_POLICY = FieldPolicy(frozenset(CompletionRequest.__struct_fields__), COMPLETION_REFUSED)


def parse_chat(body: bytes) -> ValidRequest:
    """Return the chat completion request in `body`."""
    fields = fields_of(body, _CHAT_POLICY)
    num_bytes = len(memoryview(fields["tools"])) if "tools" in fields else 0
    return valid_chat(decode_json(_chat_decoder, body), num_bytes)


def parse_completion(body: bytes) -> ValidRequest:
    """Return the text completion request in `body`."""
    fields_of(body, _COMPLETION_POLICY)
    return valid_completion(decode_json(_completion_decoder, body))


def valid_chat(request: ChatRequest, num_tool_bytes: int = 0) -> ValidRequest:
    """Return what a chat completion asks for; its `tools` took so many bytes."""
    tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, num_tool_bytes)
    prompt = ChatPrompt(template_messages(request.messages), template_kwargs(request), tools)
    max_tokens = _max_tokens(request.max_tokens, request.max_completion_tokens)
    form = _form(request, _chat_logprobs(request))
    return _valid(
        request,
        (prompt,),
        max_tokens,
        form,
        chat_grammar(requested_grammar(request), tools),
        ChatAnswers(tools, shows_thoughts=request.include_reasoning is not False),
    )


def valid_completion(request: CompletionRequest) -> ValidRequest:
    """Return what a text completion asks for."""
    prompts = _prompts(request.prompt)
    form = _completion_form(request, len(prompts))
    return _valid(request, prompts, request.max_tokens, form, requested_grammar(request))


def fields_of(body: bytes, policy: FieldPolicy) -> _Fields:
    fields = decode_json(_fields_decoder, body)
    policy.refuse(fields)
    unknown = policy.unknown(fields)
    if unknown:
        names = [name[:MAX_NAME_CHARS_IN_LOG] for name in unknown[:MAX_NAMES_IN_LOG]]
        logger.warning("unknown fields ignored", extra={"warnings": names})
    return fields


def _valid(
    request: ChatRequest | CompletionRequest,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    form: AnswerForm,
    grammar: GrammarSpec | None,
    make_parser: MakeParser | None = None,
) -> ValidRequest:
    return ValidRequest(
        model=ModelName(request.model),
        prompts=prompts,
        sampling=request,
        max_tokens=max_tokens,
        stops=stops_of(request.stop),
        form=form,
        cache_salt=request.cache_salt or "",
        make_parser=make_parser,
        grammar=grammar,
    )


def _form(request: SamplingFields, num_logprobs: int | None = None) -> AnswerForm:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
    options = options or StreamOptions()
    if options.include_obfuscation:
        raise InvalidRequest(
            "`stream_options.include_obfuscation` is not supported.",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    num_choices = request.n or 1
    return AnswerForm(
        streams=bool(request.stream),
        num_choices=num_choices,
        num_generated=num_choices,
        num_logprobs=num_logprobs,
        shows_token_ids=bool(request.return_token_ids),
        skips_special=request.skip_special_tokens is not False,
        shows_stop=bool(request.include_stop_str_in_output),
        includes_usage=bool(options.include_usage),
        has_running_usage=bool(options.include_usage and options.continuous_usage_stats),
        includes_timing=bool(options.include_timing),
    )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return None


def _completion_form(request: CompletionRequest, num_prompts: int) -> AnswerForm:
    form = _form(request)
    num_generated = form.num_choices if request.best_of is None else request.best_of
    if num_generated < form.num_choices:
        raise InvalidRequest(f"`best_of` must be at least `n` ({form.num_choices}).", param="best_of")
    if num_generated > form.num_choices and form.streams:
        raise InvalidRequest("`best_of` above `n` cannot be streamed.", param="best_of")
    if num_prompts * num_generated > MAX_CHOICES_IN_ALL:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_generated} answers each are more than {MAX_CHOICES_IN_ALL}.",
            param="n" if request.best_of is None else "best_of",
        )
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens: 0` needs `echo: true`.", param="max_tokens")
    return replace(
        form,
        num_generated=num_generated,
        num_logprobs=request.logprobs,
        echoes=bool(request.echo),
        hides_tokens=request.max_tokens == 0,
    )


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
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


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (TextPrompt(prompt),)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("`prompt` must not mix texts, token ids and lists.", param="prompt")
    if kinds == {int}:
        return (TokenPrompt([item for item in prompt if isinstance(item, int)]),)
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` must hold 1 to {MAX_PROMPTS} prompts, not {len(prompt)}.", param="prompt")
    return tuple(_prompt(item) for item in prompt)


def _prompt(item: str | int | list[int]) -> Prompt:
    match item:
        case str():
            return TextPrompt(item)
        case list():
            return TokenPrompt(item)
        case _:
            raise InvalidRequest("`prompt` must hold texts or lists of token ids.", param="prompt")
