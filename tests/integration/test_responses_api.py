"""`/v1/responses` through a whole gateway, with the official client: streamed and not."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from common.errors import WorkerLost
from gateway.engine import FinishReason
from gateway.sse import EventStream
from tests.support.family_templates import HERMES, THINKING
from tests.support.scripted_engine import Silence, Stop, Until
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, byte_ids
from tests.support.tool_scenes import ARGUMENTS, FAMILIES, SCHEMA, Scene, scene

WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "It.", "parameters": SCHEMA}
CALL = FAMILIES["hermes"].call
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


async def created(model: Scene, **fields: Any) -> Any:
    """Return a response that the official types take strictly, and that a stream of the same comes to."""
    asked = {"input": "Rain?"} | fields
    whole = await model.client.responses.create(model="tiny", **asked)
    Response.model_validate(whole.to_dict())
    async with model.client.responses.stream(model="tiny", **asked) as stream:
        types = [event.type async for event in stream]
        final = (await stream.get_final_response()) if types[-1] == "response.completed" else None
    last = (await events_of(model, **asked))[-1].response
    assert types[:2] == ["response.created", "response.in_progress"]
    for other in filter(None, (final, last)):
        assert told(other) == told(whole)
    return whole


def told(response: Any) -> dict[str, Any]:
    """Return what is equal in equal answers."""
    fields: dict[str, Any] = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        fields.pop(name)
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return fields


async def events_of(model: Scene, **asked: Any) -> list[Any]:
    """Return the events of a stream: the official types take all of them strictly, and the numbers have no gap."""
    stream = await model.client.responses.create(**({"model": "tiny", "input": "Rain?"} | asked), stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.to_dict())
    return events


async def refused(model: Scene, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        await model.client.responses.create(**({"model": "tiny", "input": "Rain?"} | fields))
    assert model.gateway.engine.requests == []
    return caught.value


async def test_a_message() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.says("It rains in 東京.")
        answer = await created(
            model,
            instructions="Be brief.",
            temperature=0.5,
            top_p=0.25,
            max_output_tokens=40,
            metadata={"a": "b"},
            store=True,
            user="u",
            truncation="disabled",
            extra_body={"top_k": 3, "seed": 7},
        )
        sampling = model.gateway.engine.requests[-1].sampling
        prompt = model.prompt()
    assert answer.output_text == "It rains in 東京."
    assert (answer.status, answer.metadata, answer.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.25, 40)
    assert answer.to_dict()["store"] is False
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("It rains in 東京.".encode())
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 7)
    assert sampling.max_tokens == 40
    assert prompt.index("Be brief.") < prompt.index("Rain?")


async def test_the_events_of_a_message() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.says("ab")
        events = await events_of(model)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert {event.item_id for event in events[3:8]} == {events[2].item.id}
    assert (events[0].response.status, events[0].response.usage, events[-1].response.status) == (
        "in_progress",
        None,
        "completed",
    )
    assert events[-1].response.output == [events[-2].item]


async def test_a_client_that_keeps_up_gets_events_past_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = EventStream.offer
    offered: list[bytes] = []

    def spy(stream: EventStream, events: Sequence[bytes]) -> bool:
        is_taken = offer(stream, events)
        offered.extend(events if is_taken else ())
        return is_taken

    monkeypatch.setattr(EventStream, "offer", spy)
    gates = {"a": asyncio.Event(), "b": asyncio.Event()}
    async with scene(CHAT_TEMPLATE) as model:
        first, second = byte_ids(model.tokenizer, "ab")
        model.gateway.engine.play([first, Until(gates["a"]), second, Until(gates["b"]), Stop()])
        events = []
        async for event in await model.client.responses.create(model="tiny", input="Rain?", stream=True):
            events.append(event)
            if event.type == "response.output_text.delta":
                gates[event.delta].set()
    assert any(b'"delta":"b"' in some for some in offered)
    assert not any(b"response.completed" in some for some in offered)
    assert [event.sequence_number for event in events] == list(range(10))


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.says("")
        answer = await created(model)
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


async def test_an_answer_that_is_cut_off() -> None:
    async with scene(HERMES) as model:
        model.says("It rai")
        answer = await created(model, max_output_tokens=3)
        assert (answer.status, answer.output_text, answer.output[0].status) == ("incomplete", "It ", "incomplete")
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        model.says('<tool_call>{"name": "get_weather", "arguments": {"ci', FinishReason.LENGTH)
        answer = await created(model, tools=[WEATHER])
        assert (answer.output[0].arguments, answer.output[0].status) == ('{"ci', "incomplete")


async def test_calls_and_what_stands_around_them() -> None:
    async with scene(HERMES) as model:
        model.says(f"Let me look.\n{CALL}\n{CALL} Well.")
        answer = await created(model, tools=[WEATHER])
        events = await events_of(model, tools=[WEATHER])
        only = await created(model, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call", "message"]
    assert [content.text for item in answer.output[::3] for content in item.content] == ["Let me look.", "Well."]
    for call in answer.output[1:3]:
        assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
        assert call.id.startswith("fc_")
        assert call.call_id.startswith("call_")
    assert len({item.id for item in answer.output}) == 4
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == ARGUMENTS * 2
    assert len(deltas) > len(ARGUMENTS)  # as they are written
    assert [item.type for item in only.output] == ["message", "function_call"]
    assert only.parallel_tool_calls is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_demanded_call(choice: Any) -> None:
    async with scene(HERMES) as model:
        ids = model.says(CALL)
        answer = await created(model, tools=[WEATHER], tool_choice=choice)
        assert model.grammar_takes(ids)
        assert not model.grammar_takes(byte_ids(model.tokenizer, "It rains."))
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.to_dict()["tool_choice"] == choice


async def test_a_turn_is_sent_back_with_the_outputs_of_its_calls() -> None:
    said = {HERMES: f"Let me look.\n{CALL}", THINKING: f"Hm.\n</think>\n\nLet me look.\n{CALL}"}
    kinds = {HERMES: ["message", "function_call"], THINKING: ["reasoning", "message", "function_call"]}
    seen = {HERMES: f"Let me look.\n{CALL}", THINKING: "<think>\nHm.\n</think>\n\nLet me look."}
    for template, text in said.items():
        async with scene(template) as model:
            model.says(text)
            first = await created(model, tools=[WEATHER], include=["reasoning.encrypted_content"])
            assert [item.type for item in first.output] == kinds[template]
            output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "No rain."}
            turn: list[Any] = [item.to_dict() for item in first.output]
            question = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
            model.says(text)
            assert (await created(model, tools=[WEATHER], input=[question, *turn, output])).output
            prompt = model.prompt()
        assert prompt.index("Rain?") < prompt.index(seen[template]) < prompt.index("No rain.")
        assert prompt.count("<|im_start|>assistant") == 2
        assert "None" not in prompt


async def test_thoughts() -> None:
    async with scene(THINKING) as model:
        model.says("Hm, 東京?\n</think>\n\nIt rains.")
        answer = await created(model, reasoning={"effort": "high", "summary": "auto"})
        assert "# high\n" in model.prompt()
        events = await events_of(model)
    thoughts, message = answer.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.status) == ("reasoning", "Hm, 東京?", "completed")
    assert (message.type, answer.output_text) == ("message", "It rains.")
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "high"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm, 東京?".encode())
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.done") == 2


async def test_a_model_that_does_not_think_knows_no_effort() -> None:
    async with scene(HERMES) as model:
        error = await refused(model, reasoning={"effort": "high"})
        assert (error.param, error.code) == ("reasoning.effort", "unsupported_parameter")


async def test_formats() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
        ids = model.says('{"a": 1}')
        answer = await created(model, text={"format": wanted})
        assert model.grammar_takes(ids)
        assert not model.grammar_takes(byte_ids(model.tokenizer, '{"a": "b"}'))
        assert answer.text is not None
        assert answer.text.to_dict() == {"format": wanted}
        await created(model, text={"format": {"type": "json_object"}, "verbosity": "medium"})
        assert model.grammar_takes(ids)
        await created(model, text={"format": {"type": "text"}})
        assert model.gateway.engine.requests[-1].sampling.grammar is None


async def test_a_parsed_answer() -> None:
    class Rain(pydantic.BaseModel):
        days: int

    async with scene(CHAT_TEMPLATE) as model:
        model.says('{"days": 2}')
        answer = await model.client.responses.parse(model="tiny", input="Rain?", text_format=Rain)
    assert answer.output_parsed == Rain(days=2)


async def test_logprobs_are_those_of_the_text() -> None:
    async with scene(THINKING) as model:
        model.says(f"Hm.\n</think>\n\n日b\n{CALL}")
        fields: dict[str, Any] = {
            "tools": [WEATHER],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        answer = await created(model, **fields)
        events = await events_of(model, **fields)
    entries = answer.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries) == "日b".encode()
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    told_of = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in told_of] == [entry.logprob for entry in entries]
    assert answer.top_logprobs == 2


async def test_logprobs_of_half_a_character() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.gateway.engine.play([*byte_ids(model.tokenizer, "日")[:2], Stop()])
        answer = await created(model, include=["message.output_text.logprobs"])
    assert len(answer.output[0].content[0].logprobs) == 2


async def test_where_the_time_went() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.says("It rains.")
        headers = {"x-tandem-timing": "true"}
        answer = await model.client.responses.with_raw_response.create(
            model="tiny", input="Rain?", extra_headers=headers
        )
        assert "total;dur=" in answer.headers["server-timing"]
        events = await events_of(model, extra_headers=headers)
    assert events[-1].response.timing["total_s"] > 0


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_that_breaks_off(streams: bool) -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.gateway.engine.play([*byte_ids(model.tokenizer, "It"), WorkerLost("the worker is gone")])
        if streams:
            events = await events_of(model)
            assert events[-1].type == "response.failed"
            assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "the worker is gone")
        else:
            with pytest.raises(openai.InternalServerError, match="the worker is gone"):
                await model.client.responses.create(model="tiny", input="Rain?")


async def test_an_answer_that_never_begins() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.gateway.engine.play([WorkerLost("the worker is gone")])
        with pytest.raises(openai.InternalServerError, match="the worker is gone"):
            await events_of(model)


async def test_an_answer_that_never_begins_though_its_stream_has() -> None:
    gate = asyncio.Event()
    async with scene(CHAT_TEMPLATE, ping_interval_s=0.01) as model:
        model.gateway.engine.play([Until(gate), WorkerLost("the worker is gone")])
        body = {"model": "tiny", "input": "Rain?", "stream": True}
        async with model.gateway.session.post(f"{model.gateway.url}/v1/responses", json=body) as response:
            assert await response.content.readline() == b": ping\n"
            gate.set()
            rest = await response.content.read()
    assert b"event: error\n" in rest
    assert b'"type":"error","sequence_number":0,"message":"the worker is gone"' in rest


async def test_a_client_that_leaves_frees_everything() -> None:
    async with scene(CHAT_TEMPLATE) as model:
        model.gateway.engine.play([*byte_ids(model.tokenizer, "It"), Silence()])
        stream = await model.client.responses.create(model="tiny", input="Rain?", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await model.gateway.engine.until_running(0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 1}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]},
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
async def test_what_cannot_be_served_is_refused(fields: dict[str, Any], param: str) -> None:
    async with scene(HERMES) as model:
        assert (await refused(model, **fields)).param == param
