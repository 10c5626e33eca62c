"""`/openapi.json` says what is served: every route, every body, every event."""

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import pytest

from common.errors import WorkerLost
from gateway.openapi.operations import OPERATIONS
from tests.support.family_templates import HERMES
from tests.support.gateway_server import Gateway, parse_events
from tests.support.scripted_engine import Stop
from tests.support.tiny_tokenizer import byte_ids
from tests.support.tool_scenes import FAMILIES, SCHEMA, WEATHER, Scene, scene

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
FLAT = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


class Description:
    """The document that a gateway serves."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def operation(self, method: str, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document["paths"][path][method]
        return found

    def answer(self, method: str, path: str, status: int, kind: str) -> dict[str, Any]:
        content: dict[str, Any] = self.operation(method, path)["responses"][str(status)]["content"][kind]
        return content

    def event(self, path: str) -> dict[str, Any]:
        """Return what the data of an event is."""
        data = self.answer("post", path, 200, "text/event-stream")["schema"]["properties"]["data"]
        found: dict[str, Any] = data.get("contentSchema") or data["anyOf"][1]["contentSchema"]
        return found

    def check(self, schema: dict[str, Any], value: Any) -> None:
        """Compare strictly: a field that the schema does not name is an error too."""
        components = {"schemas": {name: closed(part) for name, part in self.document["components"]["schemas"].items()}}
        jsonschema_rs.validator_for({**schema, "components": components}).validate(value)

    def check_request(self, path: str, body: Any) -> None:
        self.check(self.operation("post", path)["requestBody"]["content"]["application/json"]["schema"], body)


def closed(part: dict[str, Any]) -> dict[str, Any]:
    return {"additionalProperties": False, **part} if "properties" in part else part


@pytest.fixture
async def model() -> AsyncIterator[Scene]:
    async with scene(HERMES) as made:
        yield made


async def described(gateway: Gateway) -> Description:
    status, document = await gateway.get("/openapi.json")
    assert status == 200
    return Description(document)


async def test_every_route_is_described_and_nothing_else(model: Scene) -> None:
    document = (await described(model.gateway)).document
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in model.gateway.runner.app.router.routes()
        if route.method != "HEAD"  # answered like GET, without the body
    }
    assert routes == {(method, path) for path, methods in document["paths"].items() for method in methods}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names) == len(OPERATIONS)


async def test_it_is_made_once(model: Scene) -> None:
    first, second = [await (await model.gateway.session.get(model.gateway.url + "/openapi.json")).read() for _ in "ab"]
    assert first == second
    assert json.loads(first)["openapi"] == "3.1.0"


async def test_its_schemas_are_schemas_and_every_reference_leads_somewhere(model: Scene) -> None:
    document = (await described(model.gateway)).document
    for part in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate(part)
    for name in references(document):
        section, _, entry = name.removeprefix("#/components/").partition("/")
        assert entry in document["components"][section]


def references(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        case list():
            return set().union(*map(references, value))
        case _:
            return set()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_refused_fields_are_told_and_no_part_of_the_request(model: Scene, operation: Any) -> None:
    description = await described(model.gateway)
    told = description.operation(operation.method, operation.path).get("x-refused-fields", {})
    assert told.keys() == operation.refused.keys()
    if operation.request is not None:
        schema = description.document["components"]["schemas"][operation.request.__name__]
        assert told.keys().isdisjoint(schema["properties"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        (CHAT, {"tools": [WEATHER], "temperature": 0.5, "logit_bias": {"5": 1.5}, "stop": ["x", "y"]}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
        (CHAT, {"guided_json": SCHEMA, "max_completion_tokens": 20}),
        (TEXT, {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "return_token_ids": True, "n": 2}),
        (TEXT, {"prompt": [5, 6], "max_tokens": 3}),
        (RESPONSES, {"input": "hi", "metadata": {"a": "b"}, **LOGPROBS}),
        (RESPONSES, {"input": HI, "tools": [FLAT], "instructions": "Be brief.", "max_output_tokens": 9}),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
    ],
)
async def test_answers_and_events_are_as_described(model: Scene, path: str, fields: dict[str, Any]) -> None:
    description = await described(model.gateway)
    body = {"model": "tiny", **({"messages": HI} if path == CHAT else {}), **fields}
    description.check_request(path, body)
    ids = model.says(f"Look.\n{FAMILIES['hermes'].call}")
    model.gateway.engine.play([*ids, Stop(), Stop(choice=1)])
    async with model.gateway.session.post(
        model.gateway.url + path, json=body, headers={"x-tandem-timing": "true"}
    ) as response:
        assert response.status == 200
        description.check(description.answer("post", path, 200, "application/json")["schema"], await response.json())
    schema = description.event(path)
    events = await events_of(model, path, body)
    assert len(events) > 1
    for event in events:
        description.check(schema, event)


async def test_events_with_usage_and_events_of_failures_are_as_described(model: Scene) -> None:
    description = await described(model.gateway)
    schema = description.event(CHAT)
    model.says("hi")
    options = {"include_usage": True, "continuous_usage_stats": True, "include_timing": True}
    for event in await events_of(model, CHAT, {"model": "tiny", "messages": HI, "stream_options": options}):
        description.check(schema, event)
    model.gateway.engine.play([*byte_ids(model.tokenizer, "hi"), WorkerLost("it is gone")])
    events = await events_of(model, CHAT, {"model": "tiny", "messages": HI})
    assert "error" in events[-1]
    for event in events:
        description.check(schema, event)
    schema = description.event(RESPONSES)
    model.gateway.engine.play([*byte_ids(model.tokenizer, "hi"), WorkerLost("it is gone")])
    events = await events_of(model, RESPONSES, {"model": "tiny", "input": "hi"})
    assert events[-1]["type"] == "response.failed"
    for event in events:
        description.check(schema, event)


async def events_of(model: Scene, path: str, body: dict[str, Any]) -> list[Any]:
    """Return what the data of a stream's events is, but for `[DONE]`."""
    async with model.gateway.session.post(
        model.gateway.url + path, json=body | {"stream": True}, headers={"Connection": "close"}
    ) as response:
        assert response.status == 200, await response.text()
        text = await response.read()
    if path == RESPONSES:
        blocks = [block.split(b"\n") for block in text.removesuffix(b"\n\n").split(b"\n\n")]
        return [json.loads(data.removeprefix(b"data: ")) for _, data in blocks]
    return [event for event in parse_events(text) if event != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/tokenize", {"messages": HI, "tools": [WEATHER]}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
async def test_conversions_are_as_described(model: Scene, path: str, body: dict[str, Any]) -> None:
    description = await described(model.gateway)
    body = {"model": "tiny"} | body
    description.check_request(path, body)
    status, answer = await model.gateway.post(path, body)
    description.check(description.answer("post", path, status, "application/json")["schema"], answer)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health/live", "/health/ready", "/version"])
async def test_what_is_told_of_the_service_is_as_described(model: Scene, path: str) -> None:
    description = await described(model.gateway)
    status, answer = await model.gateway.get(path.replace("{model}", "tiny"))
    description.check(description.answer("get", path, status, "application/json")["schema"], answer)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"model": "tiny"}, 400),
        (RESPONSES, {"model": "other", "input": "a"}, 404),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}, 400),
    ],
)
async def test_errors_are_as_described(model: Scene, path: str, body: dict[str, Any], status: int) -> None:
    description = await described(model.gateway)
    got, answer = await model.gateway.post(path, body)
    assert got == status
    description.check(description.answer("post", path, status, "application/json")["schema"], answer)
