"""Tools and thoughts through a whole gateway, with the official client: streamed and not, for each family of models."""

from typing import Any

import pytest

from gateway.engine import FinishReason
from tests.support.family_templates import HERMES, MISTRAL, THINKING
from tests.support.scripted_engine import Stop
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, byte_ids
from tests.support.tool_scenes import ARGUMENTS, FAMILIES, NOW, WEATHER, Family, ids_of, scene


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_a_call(family: Family) -> None:
    async with scene(family.template, special=family.special) as model:
        model.says(family.call)
        whole = await model.whole(tools=[WEATHER, NOW])
        streamed = await model.streamed(tools=[WEATHER, NOW])
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    assert [(call.type, call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("function", "get_weather", ARGUMENTS)
    ]
    assert (streamed.content, streamed.finish_reason) == ("", "tool_calls")
    assert streamed.calls == [["get_weather", ARGUMENTS]]
    assert sum(bool(delta.tool_calls) for delta in streamed.deltas) > len(ARGUMENTS) / 2  # as it is written


async def test_content_and_two_calls() -> None:
    call = FAMILIES["hermes"].call
    async with scene(HERMES) as model:
        model.says(f'Let me <tool_ look.\n{call}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>')
        whole = await model.whole(tools=[WEATHER, NOW])
        streamed = await model.streamed(tools=[WEATHER, NOW])
        only = await model.whole(tools=[WEATHER, NOW], parallel_tool_calls=False)
    expected = [["get_weather", ARGUMENTS], ["now", "{}"]]
    assert whole.message.content == streamed.content == "Let me <tool_ look."
    assert [[call.function.name, call.function.arguments] for call in whole.message.tool_calls] == expected
    assert streamed.calls == expected
    ids = [call.id for call in whole.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(call_id.startswith("call_") for call_id in ids)
    assert [call.function.name for call in only.message.tool_calls] == ["get_weather"]


async def test_what_is_generated_behind_the_only_call_is_not_waited_for() -> None:
    async with scene(HERMES) as model:
        ids = model.says(FAMILIES["hermes"].call.removesuffix("\n</tool_call>"))
        model.gateway.engine.play([*ids, *([ids[0]] * 500), Stop()])
        answer = await model.client.chat.completions.create(**model.chat(), tools=[WEATHER], parallel_tool_calls=False)
        await model.gateway.engine.until_running(0)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_an_answer_without_calls(choice: str) -> None:
    async with scene(HERMES) as model:
        model.says("It rains <tool_call>.")
        whole = await model.whole(tools=[WEATHER], tool_choice=choice)
        assert ("get_weather" in model.prompt()) == (choice == "auto")
        assert model.gateway.engine.requests[-1].sampling.grammar is None
        streamed = await model.streamed(tools=[WEATHER], tool_choice=choice)
    assert whole.message.content == streamed.content == "It rains <tool_call>."
    assert whole.finish_reason == streamed.finish_reason == "stop"
    assert whole.message.tool_calls is None


async def test_without_tools_a_call_is_text() -> None:
    async with scene(HERMES) as model:
        model.says(FAMILIES["hermes"].call)
        assert (await model.whole()).message.content == FAMILIES["hermes"].call


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("family", [*FAMILIES.values(), Family(CHAT_TEMPLATE, False, "")], ids=[*FAMILIES, "other"])
async def test_a_demanded_call_is_made_by_a_grammar(family: Family, choice: str) -> None:
    call = family.call or f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with scene(family.template, special=family.special) as model:
        ids = model.says(call)
        fields = {"tools": [WEATHER, NOW], "tool_choice": named if choice == "named" else "required"}
        whole = await model.whole(**fields)
        assert model.grammar_takes(ids)
        assert not model.grammar_takes([])
        assert not model.grammar_takes(ids[:-1])
        for other in ("It rains.", call.replace("days", "weeks"), call.replace("東京", '", "x": "')):
            assert not model.grammar_takes(byte_ids(model.tokenizer, other))
        assert model.grammar_takes(model.says(call.replace("get_weather", "now").replace(ARGUMENTS, "{}"))) == (
            choice == "required"
        )
        model.says(call)
        streamed = await model.streamed(**fields)
    assert [[call.function.name, call.function.arguments] for call in whole.message.tool_calls] == streamed.calls
    assert streamed.calls == [["get_weather", ARGUMENTS]]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"


async def test_several_calls_may_be_demanded_or_one() -> None:
    call = FAMILIES["hermes"].call
    async with scene(HERMES) as model:
        ids = model.says(f"{call}\n{call}")
        await model.whole(tools=[WEATHER], tool_choice="required")
        assert model.grammar_takes(ids)
        await model.whole(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        assert not model.grammar_takes(ids)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_a_call_or_json(family: Family) -> None:
    async with scene(family.template, special=family.special) as model:
        fields = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
        if family.call.startswith("{"):
            assert (await model.refused(**fields)).param == "response_format"
            return
        ids = model.says(family.call)
        assert (await model.whole(**fields)).finish_reason == "tool_calls"
        assert model.grammar_takes(ids)
        ids = model.says('{"rain": true}')
        assert (await model.whole(**fields)).message.content == '{"rain": true}'
        assert model.grammar_takes(ids)
        assert not model.grammar_takes(byte_ids(model.tokenizer, "It rains."))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_strict_calls_match_their_schema(family: Family) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with scene(family.template, special=family.special) as model:
        ids = model.says(family.call)
        assert (await model.whole(tools=[strict])).finish_reason == "tool_calls"
        assert model.grammar_takes(ids)
        assert model.grammar_takes(byte_ids(model.tokenizer, "It rains."))
        assert not model.grammar_takes(model.says(family.call.replace("2", '"2"')))


async def test_a_call_that_is_cut_off() -> None:
    async with scene(HERMES) as model:
        model.says('<tool_call>{"name": "get_weather", "arguments": {"ci', FinishReason.LENGTH)
        whole = await model.whole(tools=[WEATHER])
        streamed = await model.streamed(tools=[WEATHER])
    assert [call.function.arguments for call in whole.message.tool_calls] == ['{"ci']
    assert streamed.calls == [["get_weather", '{"ci']]
    assert whole.finish_reason == streamed.finish_reason == "length"


@pytest.mark.parametrize("special", [False, True])
async def test_thoughts(special: bool) -> None:
    async with scene(THINKING, special=special) as model:
        model.says("Hm, 東京?\n</think>\n\nIt rains.")
        whole = await model.whole()
        assert model.prompt().endswith("assistant\n<think>\n")
        streamed = await model.streamed()
        hidden = await model.whole(extra_body={"include_reasoning": False})
    assert whole.message.reasoning_content == streamed.thoughts == "Hm, 東京?"
    assert whole.message.content == streamed.content == hidden.message.content == "It rains."
    assert whole.finish_reason == streamed.finish_reason == "stop"
    assert not hasattr(hidden.message, "reasoning_content")


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}])
async def test_the_tokens_of_thoughts_are_counted(fields: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Rain?"}], **fields}
    async with scene(THINKING) as model:
        model.says("Hm, 東京?\n</think>\n\nIt rains.")
        create = model.client.chat.completions.create
        whole = (await create(**asked)).usage
        stream = await create(**asked, stream=True, stream_options={"include_usage": True})
        *_, streamed = [chunk.usage async for chunk in stream]
        model.says("It rains.")
        unthought = await create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole == streamed
    assert whole.completion_tokens_details.reasoning_tokens == len("Hm, 東京?".encode())
    assert unthought.usage.completion_tokens_details is None


async def test_thoughts_that_are_not_finished() -> None:
    async with scene(THINKING) as model:
        model.says("Hm, <tool_call>", FinishReason.LENGTH)
        whole = await model.whole(tools=[WEATHER])
        streamed = await model.streamed(tools=[WEATHER])
    assert whole.message.reasoning_content == streamed.thoughts == "Hm, <tool_call>"
    assert (whole.message.content or "") == streamed.content == ""
    assert whole.finish_reason == streamed.finish_reason == "length"


async def test_a_model_that_is_told_not_to_think() -> None:
    async with scene(THINKING) as model:
        model.says("No </think> here.")
        whole = await model.whole(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert model.prompt().endswith("<think>\n\n</think>\n\n")
    assert whole.message.content == "No </think> here."


async def test_effort_reaches_the_template_or_is_refused() -> None:
    async with scene(THINKING) as model:
        await model.whole(reasoning_effort="high")
        assert "# high\n" in model.prompt()
        assert (await model.refused(reasoning_effort="huge")).param == "reasoning_effort"
    async with scene(HERMES) as model:
        assert (await model.refused(reasoning_effort="high")).param == "reasoning_effort"


async def test_thoughts_before_a_call() -> None:
    call = FAMILIES["hermes"].call
    async with scene(THINKING) as model:
        ids = model.says(f"Hm.\n</think>\n\n{call}")
        for choice in ("auto", "required"):
            whole = await model.whole(tools=[WEATHER], tool_choice=choice)
            assert (whole.message.reasoning_content, whole.message.content) == ("Hm.", None)
            assert whole.message.tool_calls[0].function.arguments == ARGUMENTS
            assert whole.finish_reason == "tool_calls"
        assert model.grammar_takes(ids)
        assert not model.grammar_takes(ids_of(model.tokenizer, call))  # type: ignore[arg-type]  # no other steps


async def test_thoughts_before_json() -> None:
    async with scene(THINKING) as model:
        ids = model.says('Hm.\n</think>\n\n{"a": 1}')
        answer = await model.whole(response_format={"type": "json_object"})
        assert model.grammar_takes(ids)
    assert (answer.message.reasoning_content, answer.message.content) == ("Hm.", '{"a": 1}')


async def test_history_of_a_call_reaches_the_prompt() -> None:
    async with scene(HERMES) as model:
        model.says(FAMILIES["hermes"].call)
        first = await model.whole(tools=[WEATHER])
        call = first.message.tool_calls[0]
        messages = [
            {"role": "user", "content": "Rain?"},
            first.message,
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "No."}]},
        ]
        model.says("It does not.")
        assert (await model.whole(tools=[WEATHER], messages=messages)).message.content == "It does not."
        prompt = model.prompt()
    assert FAMILIES["hermes"].call in prompt
    assert "<tool_response>\nNo.\n</tool_response>" in prompt
    assert "None" not in prompt
    assert "null" not in prompt


async def test_ids_are_such_that_the_template_takes_them_back() -> None:
    async with scene(MISTRAL, special=True) as model:
        model.says(FAMILIES["mistral"].call)
        first = await model.whole(tools=[WEATHER])
        call_id = first.message.tool_calls[0].id
        answer = {"role": "tool", "tool_call_id": call_id, "content": "No."}
        model.says("It does not.")
        await model.whole(messages=[{"role": "user", "content": "Rain?"}, first.message, answer])
        assert call_id in model.prompt()
        refusal = await model.refused(messages=[{"role": "user", "content": "Rain?"}, answer | {"tool_call_id": "1"}])
    assert refusal.param == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "extra_body": {"guided_regex": "a"}},
            "guided_regex",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"functions": [], "function_call": {"name": "f"}}, "function_call"),
    ],
)
async def test_what_cannot_be_served_is_refused(fields: dict[str, Any], param: str) -> None:
    async with scene(HERMES) as model:
        assert (await model.refused(**fields)).param == param
        assert model.gateway.engine.requests == []


async def test_a_model_that_knows_no_tools_says_so() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        error = await model.refused(tools=[WEATHER])
        assert (error.param, error.code) == ("tools", "unsupported_parameter")
        model.says("It rains.")
        assert (await model.whole(tools=[WEATHER], tool_choice="none")).message.content == "It rains."
