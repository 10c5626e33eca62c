"""Tool fields of a chat request: tool calls cannot be generated yet, so only requests that forbid them are served."""

import msgspec

from common.errors import InvalidRequest
from gateway.body import decode_field


def refuse_tools(fields: dict[str, msgspec.Raw]) -> None:
    """Raise `InvalidRequest` unless no tool is offered or `tool_choice` is "none"."""
    tools, choice = decode_field(fields, "tools"), decode_field(fields, "tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("`tools` must be an array.", param="tools")
    if choice == "none":
        return
    if tools:
        raise InvalidRequest(
            '`tools` is not supported yet; send `tool_choice: "none"` to get text.',
            param="tools",
            code="unsupported_parameter",
        )
    if choice not in (None, "auto"):
        raise InvalidRequest("`tool_choice` needs `tools`, which are not supported yet.", param="tool_choice")
