"""Whole workers that decide by what they have measured where a prompt is prefilled."""

from collections.abc import AsyncIterator

import pytest

from common.messages.registry import StepCost
from decode_worker.placing import There
from decode_worker.quotes import FIRST_HANDOVER_S
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.support.feed_client import FeedClient, make_job
from tests.support.polling import until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, Node, running_fabric

PROMPT_TOKENS = 30
NEAR, FAR = There(StepCost(0.0, 1e-9, 0.0)), There(StepCost(100.0, 1.0, 0.0))

Pair = tuple[Node[DecodeWorker], Node[PrefillWorker], FeedClient]


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def pair(fabric: Fabric) -> Pair:
    decode, prefill = await fabric.decode(disaggregation="auto"), await fabric.prefill()
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    return decode, prefill, client


async def ask(client: FeedClient, decode: Node[DecodeWorker], number: int, num_tokens: int = PROMPT_TOKENS) -> None:
    """Have a prompt answered that nobody has seen before."""
    prompt = [number, *range(600, 599 + num_tokens)]
    await client.place(make_job(str(number), prompt), decode.record)
    assert (await client.answer(str(number))).tokens == answer(prompt, 5)


async def measure_here(decode: Node[DecodeWorker], client: FeedClient) -> None:
    """Have the decode worker learn what its own steps cost."""
    await ask(client, decode, 99, num_tokens=10)
    await until(lambda: decode.edge.load.step_cost is not None, "the decode worker has measured its steps")


def count(node: Node[DecodeWorker], name: str, **labels: str) -> float:
    return node.edge.metrics.registry.get_sample_value(name, labels) or 0.0


def num_decided(node: Node[DecodeWorker], place: str, reason: str) -> float:
    return count(node, "tandem_prefill_decisions_total", place=place, reason=reason)


async def test_rates_are_measured_told_and_decided_by(pair: Pair, fabric: Fabric) -> None:
    decode, prefill, client = pair
    await ask(client, decode, 1)
    assert num_decided(decode, "remote", "unmeasured") == 1
    await until(lambda: prefill.edge.load.step_cost is not None, "the prefill worker has measured a step")
    await until(lambda: decode.worker._quotes.there() is not None, "its rate is known")
    await ask(client, decode, 2)
    assert num_decided(decode, "local", "cost") + num_decided(decode, "remote", "cost") == 1
    place = "local" if num_decided(decode, "local", "cost") else "remote"
    assert count(decode, "tandem_prefill_expected_seconds_count", place=place) == 1
    assert count(decode, "tandem_prefill_seconds_count", place=place) == 1
    await fabric.until_idle()


@pytest.mark.parametrize(("there", "place"), [(NEAR, "remote"), (FAR, "local")])
async def test_the_cheaper_place_computes(
    pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch, there: There, place: str
) -> None:
    decode, prefill, client = pair
    await measure_here(decode, client)
    monkeypatch.setattr(decode.worker._quotes, "there", lambda: there)
    for number in range(3):
        await ask(client, decode, number)
    assert num_decided(decode, place, "cost") == 3
    assert prefill.edge.load.num_steps == (12 if place == "remote" else 0), "four chunks of 8 tokens each"
    assert count(decode, "tandem_prefill_expected_seconds_count", place=place) == 3
    await fabric.until_idle()


async def test_short_prompts_stay_whatever_they_cost(
    pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill, client = pair
    monkeypatch.setattr(decode.worker._quotes, "there", lambda: NEAR)
    await ask(client, decode, 1, num_tokens=16)
    assert num_decided(decode, "local", "short") == 1
    assert prefill.edge.load.num_steps == 0
    await fabric.until_idle()


async def test_a_choice_whose_prefill_worker_dies_falls_back(
    pair: Pair, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill, client = pair
    await measure_here(decode, client)
    monkeypatch.setattr(decode.worker._quotes, "there", lambda: NEAR)
    prefill.valve.close()
    prompt = [5, *range(600, 629)]
    await client.place(make_job("orphan", prompt), decode.record)
    await until(lambda: num_decided(decode, "remote", "cost") == 1, "it was sent away")
    await until(lambda: decode.worker._receiver.attempts(), "it is bound")
    await prefill.kill()
    assert (await client.answer("orphan", deadline_s=20)).tokens == answer(prompt, 5)
    assert count(decode, "tandem_handovers_total", outcome="local") == 1
    assert count(decode, "tandem_prefill_seconds_count", place="remote") == 0, "that is no remote prefill's time"
    assert decode.worker._quotes._handover_s > FIRST_HANDOVER_S


@pytest.mark.parametrize(("setting", "place"), [("always", "remote"), ("never", "local")])
async def test_who_is_told_where_does_not_weigh(fabric: Fabric, setting: str, place: str) -> None:
    decode, prefill = await fabric.decode(disaggregation=setting), await fabric.prefill()
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    for number in range(3):
        await ask(client, decode, number)
    assert num_decided(decode, place, "setting") == 3
    assert bool(prefill.edge.load.num_steps) is (setting == "always")
    await fabric.until_idle()


async def test_without_a_prefill_worker_everything_stays(fabric: Fabric) -> None:
    decode = await fabric.decode(disaggregation="auto")
    client = await fabric.client(decode.record)
    await ask(client, decode, 1)
    assert num_decided(decode, "local", "absent") == 1
    await fabric.until_idle()
