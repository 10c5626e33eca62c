"""What a chat request lets the model call, and what of it is refused."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.chat_grammar import ChatGrammar
from gateway.schemas.tools import MAX_TOOLS
from gateway.tools.request import MAX_TOOLS_BYTES, Demand, ToolUse
from gateway.validation import ChatPrompt, ValidRequest, parse_chat


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def parsed(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode())


def use_of(**fields: Any) -> ToolUse | None:
    (prompt,) = parsed(**fields).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.tools


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "is_parallel", "demand", "max_calls", "names"),
    [
        (None, None, Demand.AUTO, None, {"f", "g"}),
        ("auto", True, Demand.AUTO, None, {"f", "g"}),
        ("auto", False, Demand.AUTO, 1, {"f", "g"}),
        ("required", None, Demand.REQUIRED, None, {"f", "g"}),
        ("required", False, Demand.REQUIRED, 1, {"f", "g"}),
        (named("g"), None, Demand.NAMED, 1, {"g"}),
        (named("g"), True, Demand.NAMED, 1, {"g"}),
    ],
)
def test_choices(
    choice: object, is_parallel: bool | None, demand: Demand, max_calls: int | None, names: set[str]
) -> None:
    fields = {"tools": [tool("f"), tool("g")], "tool_choice": choice, "parallel_tool_calls": is_parallel}
    use = use_of(**fields)
    assert use is not None
    assert (use.demand, use.max_calls, set(use.names)) == (demand, max_calls, names)
    assert [described["function"]["name"] for described in use.described] == ["f", "g"]
    assert isinstance(parsed(**fields).grammar, ChatGrammar) == (demand is not Demand.AUTO)


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": None, "tool_choice": None}, {"tools": [tool()], "tool_choice": "none"}],
)
def test_nothing_to_call(fields: dict[str, Any]) -> None:
    assert use_of(**fields) is None
    assert parsed(**fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0].function"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("é")]}, "tools[0].function.name"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools[2].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(description="x" * MAX_TOOLS_BYTES)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f"), "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function"),
        ({"tool_choice": named("g"), "tools": [tool()]}, "tool_choice.function.name"),
        ({"parallel_tool_calls": "no", "tools": [tool()]}, "parallel_tool_calls"),
        (
            {"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_what_is_malformed_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_as_many_tools_as_there_may_be() -> None:
    use = use_of(tools=[tool(f"f{number}") for number in range(MAX_TOOLS)])
    assert use is not None
    assert len(use.functions) == MAX_TOOLS


def test_the_template_sees_what_the_model_should_know() -> None:
    parameters = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    use = use_of(tools=[tool("f", description="does", parameters=parameters, strict=False), tool("g")])
    assert use is not None
    nothing = {"type": "object", "properties": {}}
    assert use.described == (
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": parameters}},
        {"type": "function", "function": {"name": "g", "parameters": nothing}},
    )


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_response_format_goes_with_tools_that_need_not_be_called(choice: str) -> None:
    request = parsed(tools=[tool()], tool_choice=choice, response_format={"type": "json_object"})
    assert isinstance(request.grammar, ChatGrammar)


def test_strict_functions_need_a_grammar() -> None:
    assert isinstance(parsed(tools=[tool("f"), tool("g", strict=True)]).grammar, ChatGrammar)
    assert parsed(tools=[tool(strict=False)]).grammar is None
