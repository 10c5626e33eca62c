"""The tools of a chat request: functions that the model may call."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_TOOLS = 128
"""OpenAI's limit."""

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class FunctionDefinition(msgspec.Struct, frozen=True):
    """A function. `parameters` is the JSON Schema of its arguments object; absent: it takes none.

    `strict`: calls match the schema for certain, because a grammar makes them.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(msgspec.Struct, frozen=True):
    """The name of one of the offered functions."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """The model must call this function."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
