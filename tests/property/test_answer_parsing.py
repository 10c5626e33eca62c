"""Whatever the cut into deltas, an answer has the same thoughts, content and calls, and no character is lost.

Kills the planted bugs attempt-forgotten, call-not-offered and half-marker-shown.
"""

import itertools
import json
from collections.abc import Callable, Sequence

from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.answer_parser import Content, Piece, Reasoning, ToolCallDelta
from gateway.chat_answer import ChatAnswer, reader_of
from gateway.engine import FinishReason
from gateway.reasoning import Markers, ThoughtSplitter
from gateway.schemas.tools import FunctionDefinition
from gateway.tools.call_parser import CallParser
from gateway.tools.framing import FUNCTION_XML, HERMES, LLAMA, MISTRAL, OBJECT, Framing, FunctionXml
from gateway.tools.request import Demand, ToolUse

FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", '{"name": "f"',
    '{"name": "g"', ', "arguments": ', ', "parameters": ', '{"a": 1}', '{"b": "}"', "[", "]", "{", "}", ",", ";", '"',
    "\\", ":", " ", "\n", "x", "é日", "<", "null", " " * 40,
    '{"name": "f", "arguments": {"a": [1, {"b": "]"}]}}', '{"name": "f", "parameters": {}}', "y" * 500,
    "<function=f>", "<function=g>", "</function>", "<parameter=t>", "<parameter=n>", "</parameter>", "</param",
    "1", "\n</",
    "<tool_call>\n<function=f>\n<parameter=t>\n", "\n</parameter>\n</function>\n</tool_call>",
)  # fmt: skip

TYPICAL = (
    '<think>x </think>\n\nx <tool_call> <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call>'
)

texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
framings = st.sampled_from([HERMES, LLAMA, MISTRAL, OBJECT, FUNCTION_XML])
cuts = st.lists(st.integers(0, 2000), max_size=30)


def pieces_of(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted({place for place in places if 0 < place < len(text)}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges) if start < end]


SCHEMA = {"type": "object", "properties": {"t": {"type": "string"}, "n": {"type": "integer"}}}
F = FunctionDefinition("f", parameters=SCHEMA)


def calls_of(
    framing: Framing | FunctionXml, *functions: FunctionDefinition, max_calls: int | None = None
) -> CallParser:
    tools = ToolUse(functions, Demand.AUTO, max_calls, ())
    return CallParser(framing, reader_of(framing, tools), lambda: "id", max_calls)


def answer(framing: Framing | FunctionXml, *, is_open: bool, max_calls: int | None = None) -> ChatAnswer:
    splitter = ThoughtSplitter(Markers("<think>", "</think>"), is_open=is_open)
    return ChatAnswer(splitter, calls_of(framing, F, max_calls=max_calls), shows_thoughts=True)


def read(make: Callable[[], ChatAnswer], parts: Sequence[str], reason: FinishReason) -> tuple[str, str, list[str], str]:
    """Return thoughts, content, calls and the finish reason."""
    parser = make()
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)]
    last, told_reason = parser.finish(reason)
    thoughts, content, calls = "", "", list[str]()
    for piece in pieces + last:
        match piece:
            case Reasoning(text):
                assert text
                thoughts += text
            case Content(text):
                assert text
                content += text
            case ToolCallDelta(index, arguments, identity, name):
                if identity is not None:
                    assert name == "f"
                    calls.append("")
                assert index == len(calls) - 1
                calls[index] += arguments
    return thoughts, content, calls, told_reason


@given(texts, framings, cuts, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(FinishReason))
@example(TYPICAL, HERMES, [9, 20, 40], False, None, FinishReason.STOP)
def test_the_cut_into_deltas_changes_nothing(
    text: str,
    framing: Framing | FunctionXml,
    places: list[int],
    is_open: bool,
    max_calls: int | None,
    reason: FinishReason,
) -> None:
    def make() -> ChatAnswer:
        return answer(framing, is_open=is_open, max_calls=max_calls)

    whole = read(make, pieces_of(text, []), reason)
    assert read(make, pieces_of(text, places), reason) == whole
    assert read(make, list(text), reason) == whole
    has_called = bool(whole[2]) and reason is FinishReason.STOP
    assert whole[3] == ("tool_calls" if has_called else reason.value)


@given(texts, framings, cuts)
def test_an_answer_without_calls_is_what_was_written(
    text: str, framing: Framing | FunctionXml, places: list[int]
) -> None:
    parser = calls_of(framing)
    told = [piece for part in pieces_of(text, places) for piece in parser.push(part)] + parser.finish()
    assert "".join(piece.text for piece in told if isinstance(piece, Content)) == text
    assert all(isinstance(piece, Content) for piece in told)


VALUES = st.text(st.sampled_from('<>/="\\\n ap</parameter>日\u2028\x07'), max_size=40)


@given(VALUES.filter(lambda value: "</parameter>" not in value), cuts, st.booleans())
def test_a_text_in_xml_comes_out_as_it_was_written(value: str, places: list[int], has_lines: bool) -> None:
    framed = f"\n{value}\n" if has_lines else value
    assume(has_lines or (not value.startswith("\n") and not value.endswith("\n")))
    text = f"<tool_call>\n<function=f>\n<parameter=t>{framed}</parameter>\n</function>\n</tool_call>"

    def make() -> ChatAnswer:
        return ChatAnswer(None, calls_of(FUNCTION_XML, F))

    for parts in ([text], pieces_of(text, places), list(text)):
        _, content, calls, reason = read(make, parts, FinishReason.STOP)
        assert (content, [json.loads(call) for call in calls], reason) == ("", [{"t": value}], "tool_calls")


@given(texts, cuts, st.booleans())
def test_thoughts_and_answer_hold_everything_but_space_and_markers(text: str, places: list[int], is_open: bool) -> None:
    splitter = ThoughtSplitter(Markers("<think>", "</think>"), is_open=is_open)
    told = [splitter.push(part) for part in pieces_of(text, places)] + [splitter.finish()]
    thoughts, content = ("".join(part) for part in zip(*told, strict=True))
    shown = "".join((thoughts + content).split())
    written = "".join(text.split())
    assert len(shown) >= len(written) - len("<think></think>")
    assert all(char in written for char in shown)
