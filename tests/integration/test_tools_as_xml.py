"""Calls that a model writes as XML, through a whole gateway, with the official client: streamed and not."""

import json
from typing import Any

import pytest

from gateway.engine import FinishReason
from tests.support.family_templates import CODER
from tests.support.tool_scenes import ARGUMENTS, NOW, WEATHER, scene

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
東京
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
LONG = "a line of a file\n" * 20


@pytest.mark.parametrize("special", [False, True])
async def test_content_and_two_calls(special: bool) -> None:
    async with scene(CODER, special=special) as model:
        model.says(f"Let me <func look.\n{CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>")
        whole = await model.whole(tools=[WEATHER, NOW])
        streamed = await model.streamed(tools=[WEATHER, NOW])
        only = await model.whole(tools=[WEATHER, NOW], parallel_tool_calls=False)
    expected = [["get_weather", ARGUMENTS], ["now", "{}"]]
    assert whole.message.content == streamed.content == "Let me <func look."
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert [[call.function.name, call.function.arguments] for call in whole.message.tool_calls] == expected
    assert streamed.calls == expected
    assert [call.function.name for call in only.message.tool_calls] == ["get_weather"]


async def test_text_is_streamed_as_it_is_written() -> None:
    async with scene(CODER) as model:
        model.says(f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{LONG}\n</parameter>\n</function>")
        streamed = await model.streamed(tools=[WEATHER])
    [(name, arguments)] = streamed.calls
    assert (name, json.loads(arguments)) == ("get_weather", {"city": LONG})
    assert sum(bool(delta.tool_calls) for delta in streamed.deltas) > len(LONG) / 2


async def test_a_call_that_is_cut_off() -> None:
    async with scene(CODER) as model:
        model.says(CALL.partition("京")[0], FinishReason.LENGTH)
        whole = await model.whole(tools=[WEATHER])
    assert whole.finish_reason == "length"
    assert whole.message.tool_calls[0].function.arguments == '{"city": "東'


async def test_a_demanded_call_is_an_object_that_a_grammar_makes() -> None:
    async with scene(CODER) as model:
        ids = model.says(f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}')
        whole = await model.whole(tools=[WEATHER], tool_choice="required")
        assert model.grammar_takes(ids)
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "tools"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_only_a_grammar_of_xml_could_promise_is_refused(fields: dict[str, Any], param: str) -> None:
    async with scene(CODER) as model:
        error = await model.refused(**fields)
    assert (error.param, error.code) == (param, "unsupported_parameter")
    assert "XML" in error.message


async def test_history_of_a_call_reaches_the_prompt() -> None:
    async with scene(CODER) as model:
        model.says("Dry.")
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        history: list[dict[str, Any]] = [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "none"},
        ]
        answer = await model.whole(tools=[WEATHER], messages=history)
        assert CALL in model.prompt()
    assert answer.message.content == "Dry."
