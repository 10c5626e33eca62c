"""Placements that are lost: what counts as a failure, and which requests run alone after them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import InvalidRequest, WorkerLost
from common.messages.ids import PlacementNumber, RequestId
from common.messages.job import Job
from common.messages.registry import WorkerHealth
from common.telemetry.metrics import FAILOVER_REASONS
from gateway.engine import EndOfChoice, FinishReason
from gateway.losses import LossReason
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, MAX_FAILURES, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.dispatch_scenes import make_request, start_waiting, until_waiting
from tests.support.polling import until
from tests.support.scripted_worker import MODEL

DISPLACED = pb.Failed(message="another one runs alone", code="displaced", is_retryable=True)
DRAINING = pb.Failed(message="it drains", code="worker_draining", is_retryable=True)
PREEMPTED = pb.Failed(message="no pages", code="preempted", is_retryable=True)


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def test_every_reason_has_its_series() -> None:
    assert {str(reason) for reason in LossReason} == FAILOVER_REASONS


class TestBudget:
    async def test_lost_tries_use_it_up_and_their_worker_is_cancelled(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        worker.accept(job)
        for _ in range(MAX_FAILURES):
            worker.send(job, try_lost=pb.TryLost(reason="prefill-0 fell silent"))
        with pytest.raises(WorkerLost, match="3 times, last because prefill-0"):
            await running
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("r", 1)
        assert gateway.count("lost_tries") == MAX_FAILURES

    async def test_a_lost_try_leaves_the_placement_alone(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        worker.accept(job)
        worker.send(job, try_lost=pb.TryLost(reason="it died"))
        answer(worker, job, [9])
        assert ids_of(await running) == [9]
        assert worker.cancels.empty()

    async def test_only_the_worker_that_accepted_can_lose_a_try(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        other = await gateway.add_worker("decode-1")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        worker.accept(job)
        for _ in range(MAX_FAILURES):
            other.send(job, try_lost=pb.TryLost(reason="it died"))
        async with asyncio.timeout(DEADLINE_S):
            assert await other.cancels.get() == ("r", 1)
        answer(worker, job, [9])
        assert ids_of(await running) == [9]
        assert gateway.count("lost_tries") == 0

    async def test_tries_and_placements_share_it(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        for _ in range(MAX_FAILURES - 1):
            job = await job_of(worker)
            worker.accept(job)
            worker.send(job, try_lost=pb.TryLost(reason="it died"))
            worker.send(job, failed=PREEMPTED)
            await worker.beat()
        with pytest.raises(WorkerLost, match="3 times"):
            await running
        assert worker.jobs.empty()
        assert gateway.count("failovers", reason="failed") == 1

    async def test_draining_workers_use_up_nothing(self, gateway: DispatchHarness) -> None:
        running = await start_waiting(gateway)
        for placement in range(1, MAX_FAILURES + 2):
            worker = await gateway.add_worker(f"decode-{placement}", placement)
            job = await job_of(worker)
            worker.accept(job)
            worker.send(job, failed=DRAINING)
            await until_waiting(gateway, placement + 1)
        last = await gateway.add_worker("decode-last", 99)
        answer(last, await job_of(last), [9])
        assert (await running)[-1] == EndOfChoice(FinishReason.LENGTH, 1)
        assert gateway.count("failovers", reason="drained") == MAX_FAILURES + 1

    async def test_a_draining_worker_hands_back_what_it_has_not_accepted(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        other = await gateway.add_worker("decode-1", 2)
        await other.beat(num_running=2)
        running = asyncio.create_task(gateway.collect(make_request()))
        worker.send(await job_of(worker), failed=DRAINING)
        answer(other, await job_of(other), [9])
        assert ids_of(await running) == [9]
        assert gateway.count("failovers", reason="drained") == 1

    async def test_a_job_that_nobody_can_run_is_declined(self, gateway: DispatchHarness) -> None:
        """Its worker looks at it before it accepts."""
        worker = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        worker.send(await job_of(worker), failed=pb.Failed(message="an unknown token", code="invalid_request"))
        with pytest.raises(InvalidRequest, match="unknown token"):
            await running

    async def test_a_draining_worker_is_not_asked_again(self, gateway: DispatchHarness) -> None:
        """The registry tells of the drain later than the worker itself."""
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        worker.accept(job)
        worker.send(job, failed=DRAINING)
        await until(lambda: gateway.count("placements", kind="again") == 1)
        await worker.beat(health=WorkerHealth.DRAINING)
        other = await gateway.add_worker("decode-1", 2)
        await other.beat()
        answer(other, await job_of(other), [9])
        assert ids_of(await running) == [9]
        assert worker.jobs.empty()

    async def test_an_emptied_redis_uses_up_nothing(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        for placement in range(1, MAX_FAILURES + 2):
            assert (await job_of(worker)).placement == placement
            await gateway.broker.jobs.withdraw(RequestId("r"), PlacementNumber(placement))  # nobody knows of it
        answer(worker, await job_of(worker), [9])
        assert ids_of(await running) == [9]

    async def test_a_request_that_ends_workers_before_they_accept_is_ended(self, gateway: DispatchHarness) -> None:
        """It waits in Redis, so the gateway cannot know which of the workers that died had taken it."""
        running = await start_waiting(gateway)
        for placement in range(1, MAX_FAILURES + 1):
            await until_waiting(gateway, placement)
            victim = await gateway.add_worker(f"victim-{placement}", placement)
            assert (await job_of(victim)).placement == placement
            await victim.stop()
        with pytest.raises(WorkerLost, match="3 workers"):
            await running

    async def test_whoever_is_displaced_by_a_suspect_goes_elsewhere_at_no_cost(self, gateway: DispatchHarness) -> None:
        running = await start_waiting(gateway)
        worker = await gateway.add_worker("decode-0", 1)
        for placement in range(1, MAX_FAILURES + 2):
            job = await job_of(worker)
            assert (job.placement, job.num_deaths) == (placement, 0)
            worker.send(job, failed=DISPLACED)
            await until_waiting(gateway, placement + 1)  # not given to the displacer at once
            await worker.beat()
        answer(worker, await job_of(worker), [9])
        assert ids_of(await running) == [9]
        assert gateway.count("failovers", reason="displaced") == MAX_FAILURES + 1

    async def test_another_worker_s_death_costs_a_waiting_request_nothing(self, gateway: DispatchHarness) -> None:
        running = await start_waiting(gateway)
        await (await gateway.add_worker("bystander", 5, seats=0)).stop()
        worker = await gateway.add_worker("decode-1", 6)
        answer(worker, await job_of(worker), [9])
        assert ids_of(await running) == [9]
        assert gateway.count("placements", kind="again") == 0


class TestSuspects:
    async def test_after_two_deaths_it_runs_alone(self, gateway: DispatchHarness) -> None:
        running = await start_waiting(gateway)
        jobs: list[Job] = []
        for placement in range(1, MAX_FAILURES):
            victim = await gateway.add_worker(f"victim-{placement}", placement)
            jobs.append(await job_of(victim))
            victim.accept(jobs[-1])
            await until(lambda: gateway.dispatcher._streams[RequestId("r")].source is not None)
            await victim.stop()
            await until_waiting(gateway, placement + 1)
        last = await gateway.add_worker("decode-last", 9)
        jobs.append(await job_of(last))
        assert [job.runs_alone for job in jobs] == [False, False, True]
        answer(last, jobs[-1], [9])
        await running
        assert gateway.count("failovers", reason="lost") == MAX_FAILURES - 1

    async def test_lost_tries_make_suspects_too(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        worker.accept(job)
        for _ in range(2):
            worker.send(job, try_lost=pb.TryLost(reason="it died"))
        worker.send(job, failed=DRAINING)
        await until_waiting(gateway, 2)
        other = await gateway.add_worker("decode-1", 2)
        again = await job_of(other)
        assert again.runs_alone
        answer(other, again, [9])
        await running

    async def test_failures_without_a_death_make_none(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        for _ in range(2):
            job = await job_of(worker)
            worker.accept(job)
            worker.send(job, failed=PREEMPTED)
            await worker.beat()
        job = await job_of(worker)
        assert not job.runs_alone
        answer(worker, job, [9])
        await running

    async def test_it_gets_the_least_busy_worker(self, gateway: DispatchHarness) -> None:
        busy = await gateway.add_worker("decode-0", 1)
        idle = await gateway.add_worker("decode-1", 2)
        await busy.beat(num_running=2)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(idle, await job_of(idle), [9])
        await running

    async def test_while_a_suspect_has_the_only_worker_others_wait(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        await worker.beat(is_exclusive=True)
        await until(lambda: not gateway.roster.open_workers(MODEL))
        running = asyncio.create_task(gateway.collect(make_request()))
        await until_waiting(gateway)
        await worker.beat()
        answer(worker, await job_of(worker), [9])
        assert ids_of(await running) == [9]
