"""Fields beyond the ordinary: what reaches the engine, and what of the end, the ids and the counts is shown."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_server import Gateway, chat_body, running_gateway, text_of
from tests.support.scripted_engine import Say, ScriptedEngine, Step, Stop
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
END = id_of(TOKENIZER, EOS)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


BODIES = {CHAT: chat_body, TEXT: text_body}


def whole_texts(answer: Any) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


async def test_fields_reach_the_engine(gateway: Gateway) -> None:
    fields = {
        "logit_bias": {"5": -100, "7": 1.5},
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        "temperature": 0.5,
        "max_tokens": 6,
        "priority": 3,
        "user": "u",
        "cache_salt": "s",
    }
    await gateway.complete(**fields)
    [request] = gateway.engine.requests
    sampling = request.sampling
    assert sampling.logit_bias == ((5, -100.0), (7, 1.5))
    assert (sampling.min_tokens, sampling.stop_ids, sampling.seed, sampling.max_tokens) == (2, (9,), -3, 6)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (4, 0.5, 0.25, 0.5)
    assert (request.priority, request.cache_salt) == (3, "s")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "ST"}, "a"),
        ({"stop": "ST", "include_stop_str_in_output": True}, "aST"),
        ({"stop_token_ids": byte_ids(TOKENIZER, "S")}, "a"),
        ({"stop_token_ids": byte_ids(TOKENIZER, "S"), "include_stop_str_in_output": True}, "aS"),
        ({"skip_special_tokens": False}, "aST"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, f"aST{EOS}"),
        ({"skip_special_tokens": False, "ignore_eos": True}, f"aST{EOS}"),
        ({"ignore_eos": True}, "aST"),
    ],
)
async def test_what_of_the_end_is_shown(gateway: Gateway, path: str, fields: dict[str, Any], text: str) -> None:
    stops_early = "stop_token_ids" in fields
    script: list[Step] = [
        *byte_ids(TOKENIZER, "aS"),
        *([] if stops_early else [*byte_ids(TOKENIZER, "T"), END]),
        Stop(),
    ]
    gateway.engine.play(script)
    _, answer = await gateway.post(path, BODIES[path](**fields))
    assert whole_texts(answer) == [text]
    gateway.engine.play(script)
    assert text_of(await gateway.events(path, BODIES[path](stream=True, **fields))) == text


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids(gateway: Gateway, path: str) -> None:
    ids = byte_ids(TOKENIZER, "日b")
    gateway.engine.play([*ids, END, Stop()])
    _, answer = await gateway.post(path, BODIES[path](return_token_ids=True))
    prompt_ids = list(gateway.engine.requests[0].prompt_ids)
    [choice] = answer["choices"]
    assert choice["token_ids"] == ids
    assert (answer if path == CHAT else choice)["prompt_token_ids"] == prompt_ids

    gateway.engine.play([*ids, END, Stop()])
    events = (await gateway.events(path, BODIES[path](return_token_ids=True, stream=True)))[:-1]
    told = [choice for event in events for choice in event["choices"]]
    assert [token_id for choice in told for token_id in choice.get("token_ids", [])] == ids
    holders = events if path == CHAT else told
    assert [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder] == [prompt_ids]


@pytest.mark.parametrize("path", BODIES)
async def test_running_usage(gateway: Gateway, path: str) -> None:
    a, b = (id_of(TOKENIZER, letter) for letter in "ab")
    gateway.engine.play([Say(1, (b,)), Say(1, (b,)), a, Stop(), Stop(choice=1)])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await gateway.events(path, BODIES[path](n=2, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1] if event["usage"] is not None]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 3)
    assert len(counts) >= len(events) - 1 - 2  # all but the chunks that name the role
