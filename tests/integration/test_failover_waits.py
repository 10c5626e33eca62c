"""What a request waits for that has lost its worker: another one, room, Redis."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from common.errors import BrokerUnavailable, Overloaded, WorkerLost
from common.messages.codec import pack_ids, unpack_ids
from common.messages.ids import FIRST_CHOICE, PlacementNumber, RequestId
from common.messages.job import Job, OpenChoice
from gateway import placing as placing_module
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.dispatch_scenes import Away, make_request, start_waiting, until_waiting
from tests.support.polling import until


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


class TestWaiting:
    async def test_the_only_worker_is_replaced_after_a_while(self, gateway: DispatchHarness) -> None:
        only = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(only, await job_of(only), [9], finish=None)
        await only.stop()
        await until_waiting(gateway, 2)
        restarted = await gateway.add_worker("decode-0", 2)
        again = await job_of(restarted)
        assert unpack_ids(again.choices[0].shown) == [9]
        answer(restarted, again, [10])
        assert ids_of(await running) == [9, 10]

    async def test_nobody_comes(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing_module, "FAILOVER_WAIT_S", 0.2)
        only = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(only, await job_of(only), [9], finish=None)
        await only.stop()
        with pytest.raises(WorkerLost, match="nobody could take"):
            await running

    async def test_a_busy_cluster_is_waited_for(
        self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(placing_module, "FAILOVER_WAIT_S", 0.1)
        first = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(first, await job_of(first), [9], finish=None)
        second = await gateway.add_worker("decode-1", 2, seats=1)
        await second.beat(num_running=1)
        looks = count_looks(gateway, monkeypatch)
        await first.stop()
        await until(lambda: len(looks) > 10, "looks at a waiting job", DEADLINE_S)
        await second.beat()
        answer(second, await job_of(second), [10])
        assert ids_of(await running) == [9, 10]


def count_looks(gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every look at where a placement is."""
    looks: list[str] = []
    original = gateway.broker.jobs.whereabouts

    async def whereabouts(request: RequestId, placement: PlacementNumber) -> str:
        looks.append(await original(request, placement))
        return looks[-1]

    monkeypatch.setattr(gateway.broker.jobs, "whereabouts", whereabouts)
    return looks


class TestRedisAway:
    async def test_a_lost_worker_is_replaced_when_redis_is_back(
        self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = await gateway.add_worker("decode-0", 1)
        second = await gateway.add_worker("decode-1", 2)
        await second.beat(num_running=3)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(first, await job_of(first), [9], finish=None)
        with Away(gateway, monkeypatch) as away:
            await first.stop()
            await until(lambda: away.num_places > 2, "attempts to place", DEADLINE_S)
            assert not running.done()
        answer(second, await job_of(second), [10])
        assert ids_of(await running) == [9, 10]

    async def test_it_stays_away(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing_module, "FAILOVER_WAIT_S", 0.2)
        first = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(first, await job_of(first), [9], finish=None)
        with Away(gateway, monkeypatch):
            await first.stop()
            with pytest.raises(WorkerLost, match="gone, and away"):
                await running

    async def test_new_requests_fail_at_once(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        await gateway.add_worker("decode-0", 1)
        with Away(gateway, monkeypatch) as away:
            await until(lambda: gateway.roster.is_away)
            begin = time.monotonic()
            with pytest.raises(BrokerUnavailable) as refusal:
                await gateway.collect(make_request())
            assert time.monotonic() - begin < 0.5
            assert refusal.value.retry_after_s > 0
            assert away.num_places == 0

    async def test_a_client_that_leaves_meanwhile_is_not_forgotten(
        self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = await start_waiting(gateway)
        with Away(gateway, monkeypatch) as away:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await until(lambda: away.num_withdrawals > 1, "attempts to withdraw", DEADLINE_S)

        async def is_gone() -> bool:
            return await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(1)) == "unknown"

        await until(is_gone, "the waiting job's end", DEADLINE_S)

    async def test_a_full_queue_is_waited_for(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client that has read a part of its answer is not turned away."""
        first = await gateway.add_worker("decode-0", 1)
        second = await gateway.add_worker("decode-1", 2)
        await second.beat(num_running=3)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(first, await job_of(first), [9], finish=None)
        refusals = 0

        async def refuse(*arguments: object) -> object:
            nonlocal refusals
            refusals += 1
            raise Overloaded("The waiting queue is full.")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.broker.jobs, "place", refuse)
            await first.stop()
            await until(lambda: refusals > 1, "refusals", DEADLINE_S)
        answer(second, await job_of(second), [10])
        assert ids_of(await running) == [9, 10]

    async def test_a_first_placement_whose_answer_was_lost_goes_on(
        self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        place, has_begun = gateway.broker.jobs.place, asyncio.Event()

        async def lose_the_answer(*arguments: Any) -> object:
            await place(*arguments)
            await has_begun.wait()
            raise BrokerUnavailable("away")

        monkeypatch.setattr(gateway.broker.jobs, "place", lose_the_answer)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(worker, await job_of(worker), [9])
        await until(lambda: gateway.shown("r"), "the first token", DEADLINE_S)
        has_begun.set()
        assert ids_of(await running) == [9]

    async def test_an_acceptance_ends_the_attempts(
        self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Redis placed the job, and only its answer was lost."""
        first = await gateway.add_worker("decode-0", 1)
        second = await gateway.add_worker("decode-1", 2)
        await second.beat(num_running=3)
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(first)
        answer(first, job, [9], finish=None)
        with Away(gateway, monkeypatch) as away:
            await first.stop()
            await until(lambda: away.num_places > 0, "attempts to place", DEADLINE_S)
            answer(second, replaced(job, [9]), [10])
            assert ids_of(await running) == [9, 10]


def replaced(job: Job, shown: list[int]) -> Job:
    """Return the second placement of a job."""
    return replace(job, placement=PlacementNumber(2), choices=(OpenChoice(FIRST_CHOICE, pack_ids(shown)),))
