"""Chat messages on their way from the request to the template: typed in, plain dictionaries out.

Rules: text parts are joined as they are; absent content is the empty text, never the word None; `developer` is called
`system`, which every template knows; a tool call's arguments are an object if they can be read as one, the empty object
if there are none, else the text that a model once wrote; a tool's answer names its call.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from gateway.schemas.chat import ChatMessage, ContentPart, ToolCall

TemplateMessage = dict[str, Any]


def template_messages(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Return what the chat template sees; raises `InvalidRequest` naming the message that cannot be served."""
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, param: str) -> TemplateMessage:
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"`{param}.content` is required for role '{message.role}'.", param=f"{param}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest(f"`{param}.tool_call_id` is required for role 'tool'.", param=f"{param}.tool_call_id")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"`{param}.tool_calls`: only the assistant calls tools.", param=f"{param}.tool_calls")
    seen: TemplateMessage = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message.content, f"{param}.content"),
    }
    if message.name is not None:
        seen["name"] = message.name
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        seen["reasoning_content"] = reasoning
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        seen["tool_calls"] = [_template_call(call, f"{param}.tool_calls[{index}]") for index, call in calls]
    return seen


def _text_of(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_text_of_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: ContentPart, param: str) -> str:
    match part.type:
        case "text":
            text = part.text
        case "refusal":
            text = part.refusal
        case _:
            raise InvalidRequest(
                f"`{param}`: only parts of type 'text' are served; this model takes no other media.",
                param=param,
                code="unsupported_content",
            )
    if text is None:
        raise InvalidRequest(f"`{param}` has no text.", param=param)
    return text


def _template_call(call: ToolCall, param: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise InvalidRequest(f"`{param}.type`: only calls of functions are served.", param=f"{param}.type")
    return {
        "id": call.id or "",
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }


def _arguments(written: Any) -> dict[str, Any] | str:  # noqa: ANN401 - clients put anything into old arguments
    match written:
        case None:
            return {}
        case dict():
            return written
        case str():
            return _object_or_text(written)
        case _:
            return msgspec.json.encode(written).decode()


def _object_or_text(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) else text
