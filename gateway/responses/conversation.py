"""The items of a response's input as the turns of a chat.

An assistant's turn is what stands together of its thoughts, its message and its calls; every other item is a turn of
its own. Nothing is stored here, so an item that only refers to an earlier one cannot be served.
"""

from collections.abc import Sequence

from common.errors import InvalidRequest
from gateway.messages import TemplateMessage, template_messages
from gateway.schemas.chat import ChatMessage, ContentPart, FunctionCall, ToolCall
from gateway.schemas.responses import InputItem

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def turns_of(instructions: str | None, items: str | Sequence[InputItem]) -> list[TemplateMessage]:
    """Return what the chat template sees; raises `InvalidRequest` naming the item that cannot be served."""
    writer = _Turns()
    if instructions:
        writer.add(ChatMessage("system", instructions))
    if isinstance(items, str):
        writer.add(ChatMessage("user", items))
    else:
        for index, item in enumerate(items):
            _take(item, f"input[{index}]", writer)
    return template_messages(writer.finish())


class _Turns:
    """Turns so far, and the assistant's turn that may still grow."""

    def __init__(self) -> None:
        self._turns: list[ChatMessage] = []
        self._thoughts: str | None = None
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, message: ChatMessage) -> None:
        self._close()
        self._turns.append(message)

    def think(self, thoughts: str) -> None:
        if self._content is not None or self._calls:
            self._close()
        self._thoughts = (self._thoughts or "") + thoughts

    def say(self, content: str) -> None:
        if self._content is not None or self._calls:
            self._close()
        self._content = content

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def finish(self) -> list[ChatMessage]:
        self._close()
        return self._turns

    def _close(self) -> None:
        if self._thoughts is not None or self._content is not None or self._calls:
            self._turns.append(
                ChatMessage(
                    "assistant", self._content, tool_calls=self._calls or None, reasoning_content=self._thoughts
                )
            )
        self._thoughts = self._content = None
        self._calls = []


def _take(item: InputItem, param: str, turns: _Turns) -> None:
    match item.type:
        case "message":
            _take_message(item, param, turns)
        case "function_call":
            name, call_id = _named(item.name, f"{param}.name"), _named(item.call_id, f"{param}.call_id")
            turns.call(ToolCall(FunctionCall(name, item.arguments), call_id, "function"))
        case "function_call_output":
            call_id = _named(item.call_id, f"{param}.call_id")
            turns.add(ChatMessage("tool", _text(item.output, f"{param}.output"), tool_call_id=call_id))
        case "reasoning":
            thoughts = item.content or item.summary
            if thoughts:
                turns.think(_text(thoughts, f"{param}.content"))
        case "item_reference":
            raise InvalidRequest(
                f"`{param}` refers to an item, but nothing is stored; send the item itself.",
                param=param,
                code="unsupported_parameter",
            )
        case _:
            raise InvalidRequest(
                f"`{param}.type`: only messages, function calls with their outputs, and reasoning are served.",
                param=f"{param}.type",
                code="unsupported_content",
            )


def _take_message(item: InputItem, param: str, turns: _Turns) -> None:
    role = item.role
    if role is None:
        raise InvalidRequest(f"`{param}.role` is required.", param=f"{param}.role")
    content = _text(item.content, f"{param}.content")
    if role == "assistant":
        turns.say(content)
    else:
        turns.add(ChatMessage(role, content))


def _named(value: str | None, param: str) -> str:
    if not value:
        raise InvalidRequest(f"`{param}` is required.", param=param)
    return value


def _text(content: str | Sequence[ContentPart] | None, param: str) -> str:
    if content is None:
        raise InvalidRequest(f"`{param}` is required.", param=param)
    if isinstance(content, str):
        return content
    return "".join(_text_of_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: ContentPart, param: str) -> str:
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        raise InvalidRequest(
            f"`{param}`: only text is served; this model takes no other media.", param=param, code="unsupported_content"
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"`{param}` has no text.", param=param)
    return text
