"""Guided answers through the HTTP API: what reaches the workers, and what is refused before anybody is asked."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.messages.sampling import SamplingParams
from gateway.guidance.source import AnyObject, Choice, JsonSchema, Regex
from gateway.guidance.text import grammar_text
from tests.support.gateway_server import Gateway, chat_body, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Step, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
ANSWER = '{"a": 1}'


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    script: list[Step] = [tuple(byte_ids(TOKENIZER, ANSWER)), Stop()]
    async with running_gateway(ScriptedEngine([CARD], [script])) as running:
        yield running


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return chat_body(**fields) if path == CHAT else {"model": "tiny", "prompt": "hello"} | fields


def schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def asked(gateway: Gateway) -> SamplingParams:
    (request,) = gateway.engine.requests
    return request.sampling


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (schema_format(SCHEMA), grammar_text(JsonSchema(json.dumps(SCHEMA)))),
        ({"response_format": {"type": "json_object"}}, grammar_text(AnyObject())),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_regex": r"\d+"}, grammar_text(Regex(r"\d+"))),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, grammar_text(Choice(("yes", "no")))),
    ],
)
async def test_the_grammar_reaches_the_workers(
    gateway: Gateway, path: str, fields: dict[str, Any], grammar: str | None
) -> None:
    status, answer = await gateway.post(path, body(path, fields))
    assert status == 200, answer
    assert asked(gateway).grammar == grammar


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_is_told_as_ever(gateway: Gateway, streams: bool) -> None:
    fields = chat_body(**schema_format(SCHEMA), stream=streams)
    if streams:
        events = await gateway.events(CHAT, fields)
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    else:
        text = (await gateway.post(CHAT, fields))[1]["choices"][0]["message"]["content"]
    assert json.loads(text) == {"a": 1}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (schema_format({"type": "object", "properties": {"foo": "bar"}}), "response_format.json_schema.schema"),
        (schema_format({"$ref": "#/definitions/nowhere"}), "response_format.json_schema.schema"),
        (schema_format({"type": "object", "not": {}}), "response_format.json_schema.schema"),
        ({"guided_json": {"type": "object", "uniqueItems": True}}, "guided_json"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
async def test_b032_a_grammar_that_cannot_be_compiled_is_refused_before_admission(
    gateway: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = await gateway.post(path, body(path, fields))
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, "invalid_grammar")
    assert error["message"].startswith(f"Invalid `{param}`: ")
    assert gateway.engine.requests == []
    assert (await gateway.post(path, body(path, {})))[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_b032_what_is_malformed_is_refused(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    status, answer = await gateway.post(TEXT, body(TEXT, fields))
    assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.engine.requests == []


async def test_a_grammar_that_takes_too_long_is_refused() -> None:
    async with running_gateway(ScriptedEngine([CARD]), grammar_timeout_s=0.5) as gateway:
        endless = {"type": "integer", "multipleOf": 123456789}
        status, answer = await gateway.post(TEXT, body(TEXT, {"guided_json": endless}))
        assert (status, answer["error"]["param"]) == (400, "guided_json")
        assert "within 0.5 s" in answer["error"]["message"]
        assert (await gateway.post(TEXT, body(TEXT, {"guided_regex": "a"})))[0] == 200


@pytest.mark.parametrize(("fields", "ends"), [({"guided_regex": "a"}, CARD.eos_ids), ({}, ())])
async def test_the_end_of_a_grammar_cannot_be_ignored(
    gateway: Gateway, fields: dict[str, Any], ends: tuple[int, ...]
) -> None:
    await gateway.post(TEXT, body(TEXT, fields | {"ignore_eos": True}))
    assert asked(gateway).stop_ids == ends


async def test_a_model_without_an_end_can_follow_no_grammar() -> None:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, eos_ids=())])) as gateway:
        status, answer = await gateway.post(TEXT, body(TEXT, {"guided_regex": "a"}))
        assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
        assert gateway.engine.requests == []
