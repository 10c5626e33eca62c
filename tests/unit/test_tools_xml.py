"""Calls that models write as XML: what counts as one, and what its values are in JSON."""

import itertools
import json
from typing import Any

import pytest

from gateway.answer_parser import Content, Piece, ToolCallDelta
from gateway.chat_answer import reader_of
from gateway.schemas.tools import FunctionDefinition
from gateway.tools.argument_types import ANY, TEXT, argument_of, types_of_parameter
from gateway.tools.call_parser import MAX_DOUBT, CallParser
from gateway.tools.framing import FUNCTION_XML
from gateway.tools.request import Demand, ToolUse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "referred": {"$ref": "#/$defs/Depth"},
    },
    "$defs": {"Depth": {"type": "number"}},
}
FUNCTION = FunctionDefinition("f", parameters=SCHEMA)
TOOLS = ToolUse((FUNCTION, FunctionDefinition("now")), Demand.AUTO, None, ())

Calls = list[tuple[str, str]]


def parser(max_calls: int | None = None) -> CallParser:
    ids = (f"call_{number}" for number in itertools.count())
    return CallParser(FUNCTION_XML, reader_of(FUNCTION_XML, TOOLS), lambda: next(ids), max_calls)


def read(*texts: str, max_calls: int | None = None) -> tuple[str, Calls]:
    """Return the content, and the calls with their arguments."""
    reader = parser(max_calls)
    pieces: list[Piece] = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case ToolCallDelta(index, arguments, None, None):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + arguments)
            case ToolCallDelta(index, arguments, identity, str(name)):
                assert (index, identity) == (len(calls), f"call_{index}")
                calls.append((name, arguments))
    return content, calls


def call(*parameters: tuple[str, str], name: str = "f", lines: str = "\n") -> str:
    written = "".join(f"<parameter={key}>{lines}{value}{lines}</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


ONE = call(("text", "x"))
F1 = ("f", '{"text": "x"}')

CASES = [
    pytest.param(ONE, "", [F1], id="one"),
    pytest.param(call(("text", "x"), lines=""), "", [F1], id="one-line"),
    pytest.param(f"Look: \n{ONE}\n", "Look:", [F1], id="content"),
    pytest.param(f"{ONE}\n{call(name='now')} done", "done", [F1, ("now", "{}")], id="two"),
    pytest.param(ONE.removesuffix("\n</tool_call>"), "", [F1], id="no-closer"),
    pytest.param(ONE.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "", [F1], id="no-frame"),
    pytest.param(f"Hm. {ONE.removeprefix('<tool_call>')}", "Hm.", [F1], id="no-opener"),
    pytest.param("<function=now></function> <function=now>\n</function>", "", [("now", "{}")] * 2, id="frameless-two"),
    pytest.param(
        call(("text", "1"), ("number", "-2"), ("flag", "True"), ("list", "[1, {}]"), ("referred", "2.5e3")),
        "",
        [("f", '{"text": "1", "number": -2, "flag": true, "list": [1, {}], "referred": 2.5e3}')],
        id="types",
    ),
    pytest.param(
        call(("number", "many"), ("list", "[1,"), ("other", "3")),
        "",
        [("f", '{"number": "many", "list": "[1,", "other": "3"}')],
        id="what-is-not-of-its-type-is-text",
    ),
    pytest.param(
        call(("text", 'a "b"\n\n\\ <p> </parameters> 日\n')),
        "",
        [("f", '{"text": "a \\"b\\"\\n\\n\\\\ <p> </parameters> 日\\n"}')],
        id="any-text",
    ),
    pytest.param(call(("text", "")), "", [("f", '{"text": ""}')], id="empty"),
    pytest.param(
        call(("text", "x"), ("text", "y"), ("number", "1")), "", [("f", '{"text": "x", "number": 1}')], id="twice"
    ),
    pytest.param("<function=f><parameter=text>x</parameter> junk", "junk", [F1], id="junk-behind-a-value"),
]

NO_CALLS = [
    pytest.param("a <b> <function and </function> </tool_call> <tool_cal", id="no-marker"),
    pytest.param("the marker <tool_call> opens, <function= too", id="markers-in-text"),
    pytest.param(call(("text", "x"), name="other"), id="not-offered"),
    pytest.param("<tool_call>\n<function=f>\nand then", id="nothing-called"),
    pytest.param('<tool_call>{"name": "f", "arguments": {}}</tool_call>', id="json"),
    pytest.param("<tool_call>\n<function=f>\n<param", id="cut-before-the-first-parameter"),
    pytest.param("<function=f\n></function>", id="name-of-two-lines"),
    pytest.param("<function=<function=f", id="name-in-a-name"),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls(text: str, content: str, calls: Calls) -> None:
    assert read(text) == (content, calls)
    assert read(*text) == (content, calls)
    for place in range(1, len(text)):
        assert read(text[:place], text[place:]) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(text: str) -> None:
    assert read(text) == (text, [])
    assert read(*text) == (text, [])
    for place in range(1, len(text)):
        assert read(text[:place], text[place:]) == (text, [])


def test_text_is_told_while_it_is_written_and_everything_else_when_it_has_ended() -> None:
    reader = parser()
    assert reader.push("<tool_call>\n<function=f>\n") == []
    assert reader.push("<parameter=") == [ToolCallDelta(0, "", "call_0", "f")]
    assert reader.push("text>\n") == [ToolCallDelta(0, '{"text": "')]
    assert reader.push("a b\n") == [ToolCallDelta(0, "a b")]
    assert reader.push("c</para") == [ToolCallDelta(0, "\\nc")]
    assert reader.push("meter>\n<parameter=number>\n1") == [ToolCallDelta(0, '", "number": ')]
    assert reader.push("2\n") == []
    assert reader.push("</parameter>\n") == [ToolCallDelta(0, "12")]
    assert reader.push("</function>") == [ToolCallDelta(0, "}")]
    assert reader.push("\n</tool_call>") == []
    assert reader.finish() == []


def test_a_cut_call_is_told_as_far_as_it_came() -> None:
    assert read("<tool_call><function=f><parameter=text>\nab") == ("", [("f", '{"text": "ab')])
    assert read("<tool_call><function=f><parameter=number>\n1") == ("", [("f", '{"number": ')])


def test_nothing_is_read_behind_the_last_call_that_is_wanted() -> None:
    assert read(ONE + ONE + "x", max_calls=1) == ("", [F1])


def test_a_call_whose_function_comes_too_late_is_content() -> None:
    text = f"<tool_call><function=f>{' ' * MAX_DOUBT}<parameter=text>x</parameter></function>"
    content, calls = read(text)
    assert (content, calls) == (text, [])
    assert read(*text) == (text, [])


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "enum": ["a"]}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None, True]}, {"string", "integer", "null", "boolean"}),
        ({"const": 1.5}, {"number"}),
        ({"oneOf": [{"type": "object"}, {"$ref": "#/$defs/Depth"}]}, {"object", "number"}),
        ({"$ref": "#/properties/x"}, ANY),
        ({"$ref": "#/nowhere/at/all"}, ANY),
        ({"type": "unheard"}, ANY),
        ({"type": 7}, ANY),
        ({}, ANY),
        (True, ANY),
    ],
)
def test_a_schema_tells_types(schema: Any, types: set[str]) -> None:
    function = FunctionDefinition("f", parameters={"properties": {"x": schema}, "$defs": SCHEMA["$defs"]})
    assert types_of_parameter(function, "x") == types
    assert types_of_parameter(function, "y") == TEXT


@pytest.mark.parametrize("parameters", [None, {}, {"properties": []}])
def test_what_a_function_does_not_describe_is_text(parameters: Any) -> None:
    assert types_of_parameter(FunctionDefinition("f", parameters=parameters), "x") == TEXT


@pytest.mark.parametrize(
    ("written", "types", "argument"),
    [
        ("null", {"string", "null"}, None),
        ("None", {"integer"}, None),
        ("null", {"string", "integer"}, "null"),
        ("FALSE", {"boolean"}, False),
        (" 7 ", {"integer"}, 7),
        ("07", {"integer"}, "07"),
        ("7.5", {"integer"}, "7.5"),
        ("7.5", {"number"}, 7.5),
        ("nan", {"number"}, "nan"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ('{"a": [1]}', {"array"}, '{"a": [1]}'),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("plain", ANY, "plain"),
        ("1e5", ANY, 1e5),
    ],
)
def test_values_become_json_by_their_types(written: str, types: set[str], argument: Any) -> None:
    assert json.loads(argument_of(written, frozenset(types))) == argument
