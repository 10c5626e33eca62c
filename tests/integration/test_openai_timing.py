"""Where an answer's time went, for clients that ask."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.engine import StageTimes
from tests.support.gateway_server import Gateway, chat_body, parse_events, running_gateway
from tests.support.scripted_engine import Say, ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card

CARD = tiny_card(byte_level_tokenizer())
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIMES = StageTimes(queue_s=0.25, wait_s=0.5, prefill_s=1.0, transfer_s=0.125, decode_s=2.0)
WORKERS = {"queue_s": 0.25, "wait_s": 0.5, "prefill_s": 1.0, "transfer_s": 0.125, "decode_s": 2.0}
OWN = {"admission_s", "tokenize_s", "total_s", "ttft_s"}
ASKING = {"x-tandem-timing": "true"}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


BODIES = {CHAT: chat_body, TEXT: text_body}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([CARD])
    engine.play([5, Stop(times=TIMES)])
    async with running_gateway(engine) as running:
        yield running


async def stream(gateway: Gateway, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Any]:
    async with gateway.session.post(gateway.url + path, json=body, headers=headers or {}) as response:
        assert "server-timing" not in response.headers  # the head is long gone when the times are known
        return parse_events(await response.read())


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_tells_and_has_the_header(gateway: Gateway, path: str) -> None:
    async with gateway.session.post(gateway.url + path, json=BODIES[path](), headers=ASKING) as response:
        timing = (await response.json())["timing"]
        header = response.headers["server-timing"]
    assert {name: timing[name] for name in WORKERS} == WORKERS
    assert timing.keys() == WORKERS.keys() | OWN
    assert 0 <= timing["admission_s"] + timing["tokenize_s"] <= timing["ttft_s"] <= timing["total_s"]
    parts = dict(part.split(";dur=") for part in header.split(", "))
    assert parts.keys() == {name.removesuffix("_s") for name in timing}
    assert (parts["queue"], parts["transfer"]) == ("250.000", "125.000")
    assert all(re.fullmatch(r"\d+\.\d{3}", number) for number in parts.values())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("includes_usage", [True, False])
@pytest.mark.parametrize("by_header", [True, False])
async def test_a_stream_tells_in_its_last_chunk(
    gateway: Gateway, path: str, includes_usage: bool, by_header: bool
) -> None:
    options = {"include_usage": includes_usage} | ({} if by_header else {"include_timing": True})
    body = BODIES[path](stream=True, stream_options=options)
    *chunks, last, _ = await stream(gateway, path, body, ASKING if by_header else None)
    assert {name: last["timing"][name] for name in WORKERS} == WORKERS
    assert (last["choices"] == []) == includes_usage
    assert all("timing" not in chunk for chunk in chunks)


async def test_the_last_chunk_is_the_end_of_the_last_choice(gateway: Gateway) -> None:
    other = StageTimes(decode_s=7.0)
    gateway.engine.play([Say(0, (5,)), Stop(choice=1, times=other), Say(0, (6,)), Stop(times=TIMES)])
    events = await stream(gateway, CHAT, chat_body(n=2, stream=True), ASKING)
    told = [(event["choices"][0]["index"], event["timing"]) for event in events[:-1] if "timing" in event]
    assert [(index, timing["decode_s"]) for index, timing in told] == [(0, 2.0)]


async def test_workers_that_tell_nothing_leave_their_stages_out(gateway: Gateway) -> None:
    gateway.engine.play([5, Stop()])
    _, answer = await gateway.post(CHAT, chat_body(), headers=ASKING)
    assert answer["timing"].keys() == OWN


async def test_without_a_token_there_is_no_time_to_the_first(gateway: Gateway) -> None:
    gateway.engine.play([Stop()])
    _, answer = await gateway.post(CHAT, chat_body(), headers=ASKING)
    assert answer["timing"].keys() == OWN - {"ttft_s"}


@pytest.mark.parametrize("headers", [{}, {"x-tandem-timing": "false"}, {"x-tandem-timing": "1"}])
async def test_nobody_is_told_who_does_not_ask(gateway: Gateway, headers: dict[str, str]) -> None:
    async with gateway.session.post(gateway.url + CHAT, json=chat_body(), headers=headers) as response:
        assert "server-timing" not in response.headers
        assert "timing" not in await response.json()
    events = await stream(gateway, CHAT, chat_body(stream=True, stream_options={"include_usage": True}), headers)
    assert all("timing" not in event for event in events[:-1])
