"""Calls read out of answers, family by family."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest

from gateway.answer_parser import Content, Piece, ToolCallDelta
from gateway.tools.call_parser import MAX_DOUBT, CallParser
from gateway.tools.call_reader import CallReader
from gateway.tools.framing import FUNCTION_XML, HERMES, LLAMA, MISTRAL, OBJECT, Framing, FunctionXml, framing_of

NAMES = frozenset({"f", "get_weather"})
F1 = ("f", '{"a": 1}')

Calls = list[tuple[str, str]]


def parser(framing: Framing, max_calls: int | None = None) -> CallParser:
    ids = (f"call_{number}" for number in itertools.count())
    return CallParser(framing, partial(CallReader, NAMES), lambda: next(ids), max_calls)


def told(pieces: list[Piece]) -> tuple[str, Calls]:
    """Return the content, and the calls with their arguments; checks what every client relies on."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case ToolCallDelta(index, arguments, None, None):
                assert index == len(calls) - 1
                assert arguments
                calls[index][1] += arguments
            case ToolCallDelta(index, arguments, identity, name):
                assert index == len(calls)
                assert identity == f"call_{index}"
                assert name is not None
                calls.append([name, arguments])
            case Content(text):
                assert text
    return content, [(name, arguments) for name, arguments in calls]


def read(framing: Framing, *texts: str, max_calls: int | None = None) -> tuple[str, Calls]:
    reader = parser(framing, max_calls)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    content, calls = told(pieces)
    assert reader.num_calls == len(calls)
    return content, calls


def cuts_in_two(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:place], text[place:]) for place in range(1, len(text)))


CASES = [
    pytest.param(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F1], id="hermes"),
    pytest.param(
        HERMES, 'Look: \n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n', "Look:", [F1], id="content"
    ),
    pytest.param(
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {"c": "}</tool_call>\\"{"}}</tool_call> done',
        "done",
        [F1, ("get_weather", '{"c": "}</tool_call>\\"{"}')],
        id="two",
    ),
    pytest.param(HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F1], id="no-closer"),
    pytest.param(HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], id="no-arguments"),
    pytest.param(
        HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")], id="null-arguments"
    ),
    pytest.param(
        HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F1], id="arguments-in-text"
    ),
    pytest.param(HERMES, '<tool_call>{"name": "f", "arguments": 17 }', "", [("f", "17")], id="arguments-a-number"),
    pytest.param(
        HERMES, '<tool_call>{"name": "f", "arguments": {"a": [}', "", [("f", '{"a": [}')], id="arguments-broken"
    ),
    pytest.param(
        HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}', "", [F1], id="arguments-twice"
    ),
    pytest.param(
        HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}} </tool_call>x', "x", [F1], id="content-behind"
    ),
    pytest.param(HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}; x', "; x", [F1], id="junk-behind-a-call"),
    pytest.param(LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", [F1], id="llama"),
    pytest.param(
        LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F1], id="python-tag"
    ),
    pytest.param(
        LLAMA,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}\n{"name": "f"}',
        "",
        [F1, ("f", "{}"), ("f", "{}")],
        id="llama-three",
    ),
    pytest.param(LLAMA, 'Yes. <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "Yes.", [F1], id="llama-content"),
    pytest.param(MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [F1], id="mistral"),
    pytest.param(
        MISTRAL,
        'Hm[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "f", "arguments": {"a": []}} ] .',
        "Hm.",
        [F1, ("f", '{"a": []}')],
        id="mistral-two",
    ),
    pytest.param(MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [F1], id="mistral-no-list"),
    pytest.param(OBJECT, '{"name": "f", "arguments": {"a": 1}}', "", [F1], id="object"),
]

NO_CALLS = [
    pytest.param(HERMES, "a <b> <tool_cal and </tool_call> too  \n", id="no-marker"),
    pytest.param(HERMES, "the marker <tool_call> opens a call", id="marker-in-text"),
    pytest.param(HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', id="not-offered"),
    pytest.param(HERMES, '<tool_call>{"name": 1}</tool_call>', id="name-a-number"),
    pytest.param(HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>', id="no-name"),
    pytest.param(HERMES, '<tool_call>{"name": "f" "arguments"', id="no-comma"),
    pytest.param(HERMES, '<tool_call>{"nam', id="cut-in-a-key"),
    pytest.param(HERMES, ' <tool_call>\n{"name": "f", ', id="cut-before-the-arguments"),
    pytest.param(HERMES, '<tool_call>{"name": "f", "arguments": }', id="no-arguments"),
    pytest.param(HERMES, "<tool_call> <tool_call><tool_call", id="markers"),
    pytest.param(LLAMA, '{"answer": {"name": "f"}}', id="json"),
    pytest.param(LLAMA, ' { "name": "Ann", "parameters": {}} {', id="json-with-a-name"),
    pytest.param(LLAMA, 'see {"name": "f", "parameters": {}}', id="llama-behind-text"),
    pytest.param(LLAMA, '<|python_tag|>search.call(query="x")', id="built-in"),
    pytest.param(MISTRAL, "[TOOL_CALLS] none [1, 2]", id="mistral-text"),
    pytest.param(MISTRAL, "[TOOL_CALLS][[1, 2]]", id="mistral-list"),
    pytest.param(OBJECT, "no <tool_call> here", id="plain"),
]


@pytest.mark.parametrize(("framing", "text", "content", "calls"), CASES)
def test_calls(framing: Framing, text: str, content: str, calls: Calls) -> None:
    assert read(framing, text) == (content, calls)
    assert read(framing, *text) == (content, calls)
    for cut in cuts_in_two(text):
        assert read(framing, *cut) == (content, calls)


@pytest.mark.parametrize(("framing", "text"), NO_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(framing: Framing, text: str) -> None:
    assert read(framing, text) == (text, [])
    assert read(framing, *text) == (text, [])
    for cut in cuts_in_two(text):
        assert read(framing, *cut) == (text, [])


def test_a_call_behind_something_that_looked_like_one() -> None:
    text = '<tool_call>no <tool_call>{"x": <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read(HERMES, text) == ('<tool_call>no <tool_call>{"x":', [F1])
    assert read(HERMES, *text) == ('<tool_call>no <tool_call>{"x":', [F1])


def test_arguments_are_told_while_they_are_written() -> None:
    reader = parser(HERMES)
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push('{"a') == [ToolCallDelta(0, '{"a', "call_0", "f")]
    assert reader.push('": "b') == [ToolCallDelta(0, '": "b')]
    assert reader.push('"}') == [ToolCallDelta(0, '"}')]
    assert reader.push("}") == []
    assert reader.finish() == []


def test_content_is_told_at_once_but_for_what_may_be_a_marker() -> None:
    reader = parser(HERMES)
    assert reader.push("a ") == [Content("a")]
    assert reader.push("b<tool") == [Content(" b")]
    assert reader.push("s>") == [Content("<tools>")]
    assert reader.push(" ") == []
    assert reader.finish() == [Content(" ")]


@pytest.mark.parametrize("framing", [HERMES, LLAMA, MISTRAL])
def test_white_space_is_not_held_back_for_ever(framing: Framing) -> None:
    reader = parser(framing)
    assert told(reader.push("\n" * 1000))[0] >= "\n" * 900
    assert told(reader.push(framing.opener + "\n" * 1000))[0].strip() == framing.opener
    assert read(framing, "\n" * 100 + '{"name": "f", "parameters": {}}')[1] == []


@pytest.mark.parametrize("num_doubtful", [MAX_DOUBT, MAX_DOUBT + 1])
def test_a_call_whose_function_comes_too_late_is_content(num_doubtful: int) -> None:
    before, behind = '<tool_call>{"arguments": {"a": "', '"}, "name": "f"'
    text = before + "x" * (num_doubtful - len(before + behind)) + behind
    calls = [text[len('<tool_call>{"arguments": ') : -len(', "name": "f"')]]
    is_call = num_doubtful <= MAX_DOUBT
    for parts in ([text + "}"], [text, "}"], list(text + "}")):
        content, found = read(HERMES, *parts)
        assert (content, [arguments for _, arguments in found]) == (("", calls) if is_call else (text + "}", []))


@pytest.mark.parametrize(
    ("framing", "beginning"), [(HERMES, '<tool_call>{"arguments": {'), (LLAMA, '{"parameters": {')]
)
def test_beginnings_of_calls_inside_of_one_another_are_not_read_again_and_again(
    framing: Framing, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, push = 0, CallReader.push

    def counted(reader: CallReader, text: str) -> int:
        nonlocal num_read
        num_read += len(text)
        return push(reader, text)

    monkeypatch.setattr(CallReader, "push", counted)
    text = beginning * 500 + "}" * 1000
    assert read(framing, text) == (text, [])
    assert num_read <= 500 * MAX_DOUBT


def test_a_cut_call_is_told_as_far_as_it_came() -> None:
    assert read(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x') == ("", [("f", '{"a": "x')])


def test_the_beginning_of_a_further_call_is_dropped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"na'
    assert read(HERMES, text) == ("", [F1])
    assert read(HERMES, *text) == ("", [F1])


def test_nothing_is_read_behind_the_last_call_that_is_wanted() -> None:
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}} and more'
    assert read(LLAMA, text, max_calls=1) == ("", [F1])
    assert read(LLAMA, *text, max_calls=1) == ("", [F1])


@pytest.mark.parametrize(
    ("template", "framing"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{{ '[TOOL_CALLS]' }}<tool_call>", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("""{{ '{"name": "' + call.name + '", "parameters": ' }}""", LLAMA),
        ("{{ '<tool_call>\n<function=' + call.name + '>\n<parameter=' }}", FUNCTION_XML),
        ("{{ '<tool_call>\n<function=' + call.name }}", None),
        ("{{ '<function=' + call.name + '>\n<parameter=' }}", None),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", None),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_family(template: str, framing: Framing | FunctionXml | None) -> None:
    assert framing_of(template) is framing
