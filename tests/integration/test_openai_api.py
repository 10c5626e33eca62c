"""The OpenAI API of a real server, in front of scripted tokens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from gateway.engine import FinishReason, Readiness
from tests.support.gateway_server import Gateway, chat_body, parse_events, raw_request, running_gateway, text_of
from tests.support.scripted_engine import Say, ScriptedEngine, Silence, Step, Stop, Until
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
END = id_of(TOKENIZER, EOS)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


BODIES = {CHAT: chat_body, TEXT: text_body}


def spoken(text: str, *, end: bool = True) -> list[Step]:
    """Return a script that says `text`, one byte per token."""
    return [*byte_ids(TOKENIZER, text), *([END] if end else []), Stop()]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


def choices_of(events: list[Any]) -> list[Any]:
    return [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]


# Streams


@pytest.mark.parametrize("path", BODIES)
async def test_b018_envelope_of_a_stream(gateway: Gateway, path: str) -> None:
    gateway.engine.play(spoken("hello"))
    *chunks, done = await gateway.events(path, BODIES[path](**USAGE))
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *body, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in body)
    choices = choices_of(body)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    if path == CHAT:
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert text_of(chunks) == "hello"


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        (CHAT, ChatCompletionChunk, {"logprobs": True, "top_logprobs": 2}),
        (CHAT, ChatCompletion, {"logprobs": True, "top_logprobs": 2}),
        (CHAT, ChatCompletionChunk, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT, ChatCompletion, {}),
        (TEXT, Completion, {"logprobs": 2, "prompt": ["a", "b"]}),
        (TEXT, Completion, {}),
    ],
)
async def test_b018_everything_has_the_types_of_the_official_client(
    gateway: Gateway, path: str, kind: type[BaseModel], fields: dict[str, Any]
) -> None:
    gateway.engine.play([Say(1, (5, 6)), *byte_ids(TOKENIZER, "日"), Stop(), Stop(choice=1)])
    body = BODIES[path](n=2, **fields) | ({"stream": True} if kind is ChatCompletionChunk else {})
    if body.get("stream"):
        *answers, _ = await gateway.events(path, body)
    else:
        answers = [(await gateway.post(path, body))[1]]
    for answer in answers:
        kind.model_validate(answer, strict=True)


async def test_usage_is_absent_unless_asked(gateway: Gateway) -> None:
    gateway.engine.play(spoken("hello"))
    events = await gateway.events(CHAT, chat_body(stream=True))
    assert all("usage" not in event for event in events[:-1])


async def test_headers_of_a_stream(gateway: Gateway) -> None:
    gateway.engine.play(spoken("hello"))
    async with gateway.session.post(gateway.url + CHAT, json=chat_body(stream=True)) as response:
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("script", "fields", "text", "reason"),
    [
        (spoken("hey"), {}, "hey", "stop"),
        (spoken("hey"), {"max_tokens": 4}, "hey", "stop"),
        (spoken("hello"), {"max_tokens": 3}, "hel", "length"),
        (spoken("abSTcd"), {"stop": "ST"}, "ab", "stop"),
        (spoken("abST"), {"stop": ["x", "ST"], "max_tokens": 4}, "ab", "stop"),
        (spoken("日本é"), {}, "日本é", "stop"),
        (spoken("日本"), {"max_tokens": 5}, "日\ufffd", "length"),
        ([*byte_ids(TOKENIZER, "hi"), Stop(FinishReason.LENGTH)], {}, "hi", "length"),
    ],
)
async def test_b005_b006_b008_b009_stream_and_whole_agree(
    gateway: Gateway, path: str, script: list[Step], fields: dict[str, Any], text: str, reason: str
) -> None:
    gateway.engine.play(script)
    status, whole = await gateway.post(path, BODIES[path](**fields))
    assert status == 200
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text
    assert choice["finish_reason"] == reason

    gateway.engine.play(script)
    events = await gateway.events(path, BODIES[path](**fields, **USAGE))
    assert text_of(events) == text
    assert [choice["finish_reason"] for choice in choices_of(events)][-1] == reason
    assert events[-2]["usage"] == whole["usage"]


async def test_b008_response_bytes_cut_anywhere_are_utf8(gateway: Gateway) -> None:
    gateway.engine.play(spoken("日本é"))
    async with gateway.session.post(gateway.url + CHAT, json=chat_body(stream=True)) as response:
        body = b"".join([chunk async for chunk in response.content.iter_chunked(1)])
    assert "\ufffd" not in body.decode("utf-8")
    assert text_of(parse_events(body)) == "日本é"


async def test_b017_usage(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "abc"), Stop(num_cached=2)])
    _, whole = await gateway.complete(prompt=[1, 2, 3, 4, 5, 6, 7])
    assert whole["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_b006_the_engine_is_released_at_the_stop_string(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "aST"), Silence()])
    _, whole = await gateway.complete(stop="ST")
    assert whole["usage"]["completion_tokens"] == 3
    await gateway.engine.until_running(0)


async def test_seed_and_request_reach_the_engine(gateway: Gateway) -> None:
    await gateway.complete(prompt=[5, 6], seed=0, temperature=0, cache_salt="s", max_tokens=3)
    await gateway.complete()
    await gateway.complete()
    first, second, third = gateway.engine.requests
    assert (list(first.prompt_ids), first.sampling.seed, first.cache_salt) == ([5, 6], 0, "s")
    assert first.sampling.stop_ids == (END,)
    assert second.sampling.seed != third.sampling.seed
    assert len({request.request for request in gateway.engine.requests}) == 3


# Requests


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [""]}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [CARD.vocab_size]}, "prompt"),
        (TEXT, {"prompt": [999999]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [[-1]]}, "prompt"),
        (TEXT, {"prompt": [5279552648203111001]}, "prompt"),
        (TEXT, {"prompt": [1] * 64}, "prompt"),
        (TEXT, {"stop_token_ids": [CARD.vocab_size], "min_tokens": 3}, "stop_token_ids"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"max_tokens": 10**9}, "messages"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"top_p": 1.0001}, "top_p"),
    ],
)
async def test_b019_b020_b022_b024_bad_requests(
    gateway: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    status, answer = await gateway.post(path, BODIES[path](**fields))
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["type"] == "invalid_request_error"
    assert gateway.engine.requests == []


async def test_b019_empty_prompt_with_bos_is_one_token() -> None:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, add_bos=True)])) as gateway:
        assert (await gateway.complete(prompt=""))[0] == 200
        assert len(gateway.engine.requests[0].prompt_ids) == 1


async def test_b024_the_default_limit_is_the_rest_of_the_context(gateway: Gateway) -> None:
    gateway.engine.play([tuple(byte_ids(TOKENIZER, "x" * 64))])
    _, answer = await gateway.chat()
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_model_without_template_cannot_chat() -> None:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, chat_template=None)])) as gateway:
        status, answer = await gateway.chat()
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        assert (await gateway.complete())[0] == 200


async def test_long_texts_are_tokenised_alike(gateway: Gateway) -> None:
    gateway.engine.cards = [tiny_card(TOKENIZER, max_context=10_000)]
    text = "hello the 日本 " * 300
    await gateway.complete(prompt=text)
    assert list(gateway.engine.requests[0].prompt_ids) == TOKENIZER.encode(text).ids


@pytest.mark.parametrize("name", ["other", "x\ny", "é" * 5000, ""])
async def test_unknown_model(gateway: Gateway, name: str) -> None:
    status, answer = await gateway.chat(model=name)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert len(answer["error"]["message"]) < 300


async def test_no_model_at_all_is_not_the_clients_fault() -> None:
    async with running_gateway(ScriptedEngine([])) as gateway:
        assert (await gateway.chat())[0] == 503
        assert await gateway.get("/v1/models") == (200, {"object": "list", "data": []})


# Other paths


async def test_models(gateway: Gateway) -> None:
    entry = {"id": "tiny", "object": "model", "created": CARD.created, "owned_by": "tandem", "max_model_len": 64}
    assert await gateway.get("/v1/models") == (200, {"object": "list", "data": [entry]})
    assert await gateway.get("/v1/models/tiny") == (200, entry)
    status, answer = await gateway.get("/v1/models/org/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_unknown_routes_and_methods(gateway: Gateway) -> None:
    status, answer = await gateway.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    async with gateway.session.get(gateway.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_b110_ready_says_what_the_engine_says(gateway: Gateway) -> None:
    assert (await gateway.get("/health/ready"))[0] == 200
    gateway.engine.state = Readiness(is_ready=False, reason="no decode worker")
    assert await gateway.get("/health/ready") == (503, {"status": "not ready", "reason": "no decode worker"})
    assert (await gateway.get("/health/live"))[0] == 200


async def test_b112_ready_does_not_wait_for_running_requests(gateway: Gateway) -> None:
    gateway.engine.play([Silence()])
    held = asyncio.create_task(gateway.chat())
    await gateway.engine.until_running(1)
    assert (await gateway.get("/health/ready"))[0] == 200
    held.cancel()


# Sockets


async def test_one_write_for_all_ready_events(gateway: Gateway) -> None:
    gateway.engine.play([tuple(byte_ids(TOKENIZER, "hello")), Stop()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(TEXT, text_body(stream=True)))
        received = await reader.readuntil(b"[DONE]")
    body = received.split(b"\r\n\r\n", 1)[1]
    assert body.count(b"data: ") == 3
    assert body.count(b"\r\n") == 1  # one HTTP chunk


async def test_b113_pings_while_nothing_comes() -> None:
    async with running_gateway(ScriptedEngine([CARD]), ping_interval_s=0.05) as gateway:
        gates = [asyncio.Event(), asyncio.Event()]
        gateway.engine.play([Until(gates[0]), *byte_ids(TOKENIZER, "h"), Until(gates[1]), *spoken("i")])
        async with gateway.connection() as (reader, writer):
            writer.write(raw_request(CHAT, chat_body(stream=True)))
            for gate in gates:
                for _ in range(2):
                    await reader.readuntil(b": ping\n\n")
                gate.set()
            rest = await reader.readuntil(b"[DONE]")
        assert b'"i"' in rest


async def test_http_1_0_client(gateway: Gateway) -> None:
    gateway.engine.play(spoken("hello"))
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await reader.read()
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head.lower()
    assert text_of(parse_events(body)) == "hello"
