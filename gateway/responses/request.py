"""The edge of the Responses API: bytes of a body in, a chat request out, or a `RequestError` that names the parameter.

Errors that come later, from what a chat request goes through, are put into the words of this API by `in_own_words`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET

from common.errors import InvalidRequest
from common.messages.ids import ModelName
from gateway.body import decode_json
from gateway.chat_answer import ChatAnswers
from gateway.chat_grammar import chat_grammar
from gateway.guidance.fields import RequestedGrammar, schema_of
from gateway.guidance.source import AnyObject
from gateway.responses.conversation import turns_of
from gateway.schemas.responses import LOGPROBS, FunctionTool, NamedFunction, ResponseRequest, TextFormat, ToolSelection
from gateway.schemas.tools import ChosenFunction, FunctionDefinition, NamedChoice, Tool, ToolChoice
from gateway.template_kwargs import allowed_kwargs
from gateway.tools.request import ToolUse, tool_use
from gateway.unsupported import RESPONSE_REFUSED, FieldPolicy
from gateway.validation import AnswerForm, ChatPrompt, ValidRequest, fields_of, stops_of

_decoder = msgspec.json.Decoder(ResponseRequest)
_policy = FieldPolicy(frozenset(ResponseRequest.__struct_fields__), RESPONSE_REFUSED)

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
_TOOL = re.compile(r"(tools\[\d+\])\.function\b")


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What was asked for, and the chat request that it amounts to."""

    fields: ResponseRequest
    chat: ValidRequest


def parse_response(body: bytes) -> AskedResponse:
    """Return what `body` asks for."""
    fields = fields_of(body, _policy)
    request = decode_json(_decoder, body)
    tools = _tool_use(request, len(memoryview(fields["tools"])) if "tools" in fields else 0)
    chat = ValidRequest(
        model=ModelName(request.model),
        prompts=(ChatPrompt(turns_of(request.instructions, request.input), _template_kwargs(request), tools),),
        sampling=request,
        max_tokens=request.max_output_tokens,
        stops=stops_of(request.stop),
        form=_form(request),
        cache_salt=request.cache_salt or "",
        make_parser=ChatAnswers(tools),
        grammar=chat_grammar(_requested_grammar(request), tools),
    )
    return AskedResponse(request, chat)


def in_own_words(error: InvalidRequest) -> InvalidRequest:
    """Return an error of a chat request with the names that its client knows."""
    if error.param is None:
        return error
    param = _TOOL.sub(r"\1", _NAMES.get(error.param, error.param))
    message = error.message.replace(f"`{error.param}`", f"`{param}`")
    return InvalidRequest(_TOOL.sub(r"\1", message), param=param, code=error.code)


def _form(request: ResponseRequest) -> AnswerForm:
    has_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not has_logprobs:
        raise InvalidRequest(f'`top_logprobs` needs "{LOGPROBS}" in `include`.', param="top_logprobs")
    return replace(
        AnswerForm(),
        streams=bool(request.stream),
        num_logprobs=(request.top_logprobs or 0) if has_logprobs else None,
        skips_special=request.skip_special_tokens is not False,
        shows_stop=bool(request.include_stop_str_in_output),
    )


def _template_kwargs(request: ResponseRequest) -> dict[str, bool | str]:
    kwargs = allowed_kwargs(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        kwargs["reasoning_effort"] = request.reasoning.effort
    return kwargs


def _tool_use(request: ResponseRequest, num_bytes: int) -> ToolUse | None:
    tools = None if request.tools is None else [_tool(tool) for tool in request.tools]
    try:
        return tool_use(tools, _choice(request.tool_choice), request.parallel_tool_calls, num_bytes)
    except InvalidRequest as error:
        raise in_own_words(error) from error


def _tool(tool: FunctionTool) -> Tool:
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: ToolSelection | None) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedChoice("function", ChosenFunction(choice.name))
    return choice


def _requested_grammar(request: ResponseRequest) -> RequestedGrammar | None:
    wanted = TextFormat() if request.text is None or request.text.format is None else request.text.format
    if wanted.type != "json_schema":
        if wanted.schema is not UNSET:
            param = "text.format.schema"
            raise InvalidRequest(f"`{param}` has no meaning in a format of type {wanted.type}.", param=param)
        return RequestedGrammar(AnyObject(), "text.format") if wanted.type == "json_object" else None
    param = "text.format.schema"
    schema = None if wanted.schema is UNSET else schema_of(wanted.schema, param)
    if schema is None:
        raise InvalidRequest(f"`{param}` must be an object.", param=param)
    return RequestedGrammar(schema, param)
