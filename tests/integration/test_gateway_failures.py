"""Engines that fail: an ordinary answer before the first byte, one error event after it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import pytest

from common.errors import InvalidLogits, Overloaded, WorkerLost
from common.telemetry.logs import request_id
from tests.support.gateway_server import Gateway, chat_body, running_gateway, text_of
from tests.support.scripted_engine import ScriptedEngine, Silence, Step, Stop, Vanish
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


@pytest.fixture
def loud_lines() -> Iterator[list[str]]:
    """The request that each warning and error in the log belongs to."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(request_id.get())

    collector = Collector(logging.WARNING)
    logging.getLogger().addHandler(collector)
    yield found
    logging.getLogger().removeHandler(collector)


@pytest.mark.parametrize("failure", [WorkerLost("gone"), InvalidLogits("nan"), KeyError("bug"), Vanish()])
async def test_b001_failure_in_the_middle_is_one_error_event(
    gateway: Gateway, failure: Step, loud_lines: list[str]
) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "hello"), failure])
    events = await gateway.events(CHAT, chat_body(stream=True))
    assert text_of(events) == "hello"
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in events
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    await gateway.engine.until_running(0)
    assert loud_lines == [gateway.engine.requests[0].request]


async def test_b001_an_engine_that_falls_silent() -> None:
    async with running_gateway(ScriptedEngine([CARD]), max_silence_s=0.05) as gateway:
        gateway.engine.play([*byte_ids(TOKENIZER, "hello"), Silence()])
        events = await gateway.events(CHAT, chat_body(stream=True))
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await gateway.engine.until_running(0)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("failure", "status"), [(WorkerLost("gone"), 503), (Overloaded("full", retry_after_s=7), 503), (KeyError("x"), 500)]
)
async def test_failure_before_the_first_byte_is_an_ordinary_answer(
    gateway: Gateway, streams: bool, failure: Exception, status: int
) -> None:
    gateway.engine.play([failure])
    async with gateway.session.post(gateway.url + CHAT, json=chat_body(stream=streams)) as response:
        assert response.status == status
        assert ("Retry-After" in response.headers) == (status == 503)
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_failure_of_a_whole_answer_tells_no_part_of_it(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "hello"), WorkerLost("gone")])
    status, answer = await gateway.chat()
    assert (status, answer["error"]["code"]) == (503, "worker_lost")


async def test_overload_is_refused_at_once() -> None:
    async with running_gateway(ScriptedEngine([CARD]), max_concurrent_requests=1) as gateway:
        gateway.engine.play([Silence()], [*byte_ids(TOKENIZER, "hi"), Stop()])
        held = asyncio.create_task(gateway.chat())
        await gateway.engine.until_running(1)
        async with gateway.session.post(gateway.url + CHAT, json=chat_body()) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
        assert len(gateway.engine.requests) == 1
        held.cancel()
        await gateway.engine.until_running(0)
        assert (await gateway.chat())[0] == 200
