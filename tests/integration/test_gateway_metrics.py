"""What `/metrics` says about requests, and what clients cannot make it say."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import WorkerLost
from tests.support.gateway_server import Gateway, chat_body, raw_request, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop, Until
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


def sample(metrics: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name))


async def test_b129_first_and_next_tokens_are_timed(gateway: Gateway) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    gateway.engine.play([Until(gates[0]), 1, Until(gates[1]), 2, Until(gates[2]), 3, Stop()])
    for gate, delay_s in zip(gates, (0.2, 0.3, 0.4), strict=True):
        asyncio.get_running_loop().call_later(delay_s, gate.set)
    started = time.monotonic()
    async with gateway.session.post(
        gateway.url + TEXT, json={"model": "tiny", "prompt": "hello", "stream": True}
    ) as response:
        await response.content.readany()
        watched_s = time.monotonic() - started
        await response.read()
    metrics = (await gateway.get("/metrics"))[1]
    assert sample(metrics, "tandem_time_to_first_token_seconds_count") == 1
    assert sample(metrics, "tandem_time_to_first_token_seconds_sum") == pytest.approx(watched_s, rel=0.05, abs=0.05)
    assert sample(metrics, "tandem_inter_token_latency_seconds_count") == 2
    assert sample(metrics, "tandem_inter_token_latency_seconds_sum") == pytest.approx(0.2, abs=0.1)
    assert sample(metrics, "tandem_generation_tokens_total") == 3


async def test_b129_no_first_token_no_ttft(gateway: Gateway) -> None:
    gateway.engine.play([WorkerLost("gone")])
    await gateway.chat()
    gateway.engine.play([1, Stop()])
    await gateway.chat()
    metrics = (await gateway.get("/metrics"))[1]
    assert sample(metrics, "tandem_time_to_first_token_seconds_count") == 1
    assert sample(metrics, "tandem_inter_token_latency_seconds_count") == 0


async def test_b129_a_client_that_leaves_before_its_first_token_has_no_ttft(gateway: Gateway) -> None:
    gateway.engine.play([Silence()])
    async with gateway.connection() as (_, writer):
        writer.write(raw_request(TEXT, {"model": "tiny", "prompt": "hello"}))
        await gateway.engine.until_running(1)
        writer.transport.abort()
        await gateway.engine.until_running(0)
    metrics = (await gateway.get("/metrics"))[1]
    assert sample(metrics, "tandem_time_to_first_token_seconds_count") == 0
    assert sample(metrics, "tandem_request_aborted_total") == 1
    assert sample(metrics, 'tandem_request_success_total{finished_reason="abort"}') == 1
    assert sample(metrics, f'tandem_requests_total{{endpoint="{TEXT}",status="499"}}') == 1
    assert sample(metrics, "tandem_requests_running") == 0


async def test_b129_tokens_that_come_together_count_one_by_one(gateway: Gateway) -> None:
    gateway.engine.play([(1, 2, 3), (4, 5), Stop()])
    await gateway.complete(max_tokens=9)
    metrics = (await gateway.get("/metrics"))[1]
    assert sample(metrics, "tandem_time_to_first_token_seconds_count") == 1
    assert sample(metrics, "tandem_inter_token_latency_seconds_count") == 4
    assert sample(metrics, "tandem_generation_tokens_total") == 5


async def test_failures_are_counted_by_our_own_codes(gateway: Gateway) -> None:
    gateway.engine.play([1, WorkerLost("gone")])
    await gateway.chat()
    await gateway.chat(model="no such model")
    metrics = (await gateway.get("/metrics"))[1]
    assert sample(metrics, "tandem_request_failures_total") == 1
    assert sample(metrics, 'tandem_request_failures_total{code="worker_lost"}') == 1
    assert sample(metrics, 'tandem_request_success_total{finished_reason="error"}') == 1


async def test_b126_clients_cannot_make_series(gateway: Gateway) -> None:
    async def num_series() -> int:
        return len((await gateway.get("/metrics"))[1].splitlines())

    async def strange_requests(salt: str) -> None:
        await gateway.chat(model=f"model-{salt}")
        await gateway.chat(user=f"user-{salt}")
        await gateway.get(f"/{salt}.php")
        await gateway.session.request("BREW", gateway.url + "/v1/models")
        await gateway.post(f"/v1/{salt}", {})
        await gateway.get(f"/v1/models/{salt}")
        names = {"Authorization": f"Bearer sk-{salt}", "X-Request-Id": salt, "User-Agent": salt}
        await gateway.post(CHAT, chat_body(stop=[salt], max_tokens=1), headers=names)

    await strange_requests("first")
    await num_series()  # counts itself from now on
    before = await num_series()
    for number in range(20):
        await strange_requests(str(number))
    assert await num_series() == before


async def test_the_names_of_vllm_are_there_if_wanted() -> None:
    engine = ScriptedEngine([])
    async with running_gateway(engine, vllm_metrics=True) as gateway:
        assert "vllm:" not in (await gateway.get("/metrics"))[1]
        engine.cards = [CARD]
        engine.play([1, Stop()])
        await gateway.chat()
        metrics = (await gateway.get("/metrics"))[1]
        assert sample(metrics, 'vllm:request_success_total{finished_reason="stop",model_name="tiny"}') == 1
        assert (await gateway.get("/metrics"))[0] == 200
