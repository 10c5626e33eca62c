"""What a chat request lets the model call: its `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from gateway.schemas.tools import FunctionDefinition, NamedChoice, Tool, ToolChoice

MAX_TOOLS_BYTES = 512 * 1024
"""128 tools of 4 KiB each; what the model's context holds is less in any case."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that takes none."""


class Demand(enum.Enum):
    """How free the model is."""

    AUTO = enum.auto()
    """To call or not, and what."""
    REQUIRED = enum.auto()
    """It must call one at least."""
    NAMED = enum.auto()
    """It must call the only one there is, once."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that may be called, at least one. `max_calls` None: as often as the model likes."""

    functions: tuple[FunctionDefinition, ...]
    demand: Demand
    max_calls: int | None
    described: tuple[Mapping[str, Any], ...]
    """All tools of the request as the chat template sees them."""

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(function.name for function in self.functions)

    @property
    def is_forced(self) -> bool:
        """Whether there must be a call."""
        return self.demand is not Demand.AUTO

    @property
    def is_strict(self) -> bool:
        """Whether some calls must match their schemas, if there are any."""
        return any(function.strict for function in self.functions)


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, is_parallel: bool | None, num_bytes: int
) -> ToolUse | None:
    """Return what may be called, None if nothing. `num_bytes` is the length of `tools` in the body.

    Raises `InvalidRequest` naming the part that cannot be served.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        return None
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"`tools` is longer than {MAX_TOOLS_BYTES} bytes.", param="tools")
    _check_functions(tools)
    described = tuple(map(_described, tools))
    max_calls = 1 if is_parallel is False else None
    functions = tuple(tool.function for tool in tools)
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolUse(functions, Demand.AUTO, max_calls, described)
        case "required":
            return ToolUse(functions, Demand.REQUIRED, max_calls, described)
        case NamedChoice():
            return ToolUse((_named(functions, choice.function.name),), Demand.NAMED, 1, described)


def _check_functions(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path, function = f"tools[{index}].function", tool.function
        if function.name in names:
            raise InvalidRequest(f"`{path}.name`: '{function.name}' is there already.", param=f"{path}.name")
        names.add(function.name)
        if function.parameters is not None and function.parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f"`{path}.parameters.type` must be 'object': arguments have names.", param=f"{path}.parameters.type"
            )


def _named(functions: Sequence[FunctionDefinition], name: str) -> FunctionDefinition:
    for function in functions:
        if function.name == name:
            return function
    raise InvalidRequest("`tool_choice.function.name` is none of the tools.", param="tool_choice.function.name")


def _described(tool: Tool) -> Mapping[str, Any]:
    """What the model is told. Templates expect every function to have parameters."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    parameters = tool.function.parameters
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": function}
