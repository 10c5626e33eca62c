"""Requests that would wait too long for a worker: refused at once, the like of them without asking, and in the end also
those whose wait was foreseen to be shorter."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from common.broker.memory_broker import MemoryBroker
from common.broker.policy import BrokerPolicy
from common.errors import Overloaded
from tests.support.dispatch_gateway import dispatch_gateway
from tests.support.dispatch_harness import DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.dispatch_scenes import make_request, until_waiting
from tests.support.polling import until
from tests.support.scripted_worker import MODEL

MAX_QUEUE_S = 0.3


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers, where nobody waits for long; one may wait before anybody knows how fast that is."""
    quicken(monkeypatch)
    running = DispatchHarness(MemoryBroker(MODEL, policy=BrokerPolicy(max_queue_s=MAX_QUEUE_S)), MAX_QUEUE_S)
    yield running
    await running.close()


def nobody_waits(harness: DispatchHarness) -> Callable[[], Awaitable[bool]]:
    """Return whether the waiting set is empty, as a gateway hears it."""

    async def holds() -> bool:
        return (await harness.broker.jobs.beat_gateway(harness.gateway)).num_requests == 0

    return holds


class TestLongestWait:
    async def test_who_waits_longer_is_sent_away_and_holds_nothing(self, harness: DispatchHarness) -> None:
        full = await harness.add_worker("full", seats=1)
        await full.beat(num_running=1)
        with pytest.raises(Overloaded, match=r"within 0\.3 s") as refusal:
            await harness.collect(make_request())
        assert 1.0 <= refusal.value.retry_after_s <= 60.0
        await until(nobody_waits(harness), "nobody waits")
        await full.beat(num_running=0)
        assert full.jobs.empty()

    async def test_who_gets_room_in_time_is_served(self, harness: DispatchHarness) -> None:
        busy = await harness.add_worker("busy", seats=1)
        await busy.beat(num_running=1)
        running = asyncio.create_task(harness.collect(make_request()))
        await until_waiting(harness)
        await busy.beat(num_running=0)
        answer(busy, await job_of(busy), [9])
        assert ids_of(await running) == [9]

    async def test_whoever_was_served_before_is_not_sent_away(self, harness: DispatchHarness) -> None:
        first = await harness.add_worker("decode-0", 1)
        running = asyncio.create_task(harness.collect(make_request()))
        answer(first, await job_of(first), [9], finish=None)
        second = await harness.add_worker("decode-1", 2, seats=1)
        await second.beat(num_running=1)
        await first.stop()
        await until_waiting(harness, 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * MAX_QUEUE_S):
                await asyncio.shield(running)
        await second.beat(num_running=0)
        answer(second, await job_of(second), [10])
        assert ids_of(await running) == [9, 10]


@pytest.mark.parametrize("streams", [True, False])
async def test_the_like_of_a_refused_one_is_refused_without_asking(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    full = await harness.add_worker("full", seats=1)
    await full.beat(num_running=1)
    async with dispatch_gateway(harness) as gateway:
        asked = 0

        async def refuse(*arguments: object) -> object:
            nonlocal asked
            asked += 1
            raise Overloaded("So much waits.", retry_after_s=7.0, lasts_s=60.0)

        monkeypatch.setattr(harness.broker.jobs, "place", refuse)
        for _ in range(4):
            status, error = await gateway.chat({}, streams=streams)
            assert (status, error["error"]["code"]) == (503, "overloaded")
        assert asked == 1
