"""Placements that are lost: what counts as a failure, who runs alone, and what a request waits for."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from common.errors import BrokerUnavailable, InvalidRequest, Overloaded, RequestCancelled, WorkerLost
from common.messages.codec import pack_ids, unpack_ids
from common.messages.ids import PlacementNumber, RequestId
from common.messages.job import Job
from common.messages.registry import WorkerHealth
from common.messages.sampling import SamplingParams
from common.telemetry.metrics import FAILOVER_REASONS
from gateway import placing as placing_module
from gateway.engine import EndOfStream, FinishReason, GenerateEvent, GenerateRequest
from gateway.losses import LossReason
from gateway.streams import Source
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, MAX_FAILURES, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, ScriptedWorker

DRAINING = pb.Failed(message="it drains", code="worker_draining", is_retryable=True)
PREEMPTED = pb.Failed(message="no pages", code="preempted", is_retryable=True)


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def make_request(name: str = "r", *, worker: ScriptedWorker | None = None) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=8)
    named = None if worker is None else worker.worker
    return GenerateRequest(RequestId(name), MODEL, [5, 6, 7], sampling, worker=named)


def source_of(worker: ScriptedWorker) -> Source:
    return Source(worker.worker, worker.epoch)


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
        assert (await running)[-1] == EndOfStream(FinishReason.LENGTH, 1)
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
        with pytest.raises(WorkerLost, match="3 times"):
            await running

    async def test_another_worker_s_death_costs_a_waiting_request_nothing(self, gateway: DispatchHarness) -> None:
        running = await start_waiting(gateway)
        await (await gateway.add_worker("bystander", 5, seats=0)).stop()
        worker = await gateway.add_worker("decode-1", 6)
        answer(worker, await job_of(worker), [9])
        assert ids_of(await running) == [9]
        assert gateway.count("placements", kind="again") == 0


async def start_waiting(gateway: DispatchHarness) -> asyncio.Task[list[GenerateEvent]]:
    """Return a request that waits in Redis while no worker is left."""
    full = await gateway.add_worker("full", 77, seats=0)
    running = asyncio.create_task(gateway.collect(make_request()))
    await until_waiting(gateway)
    await full.stop()
    await until(lambda: not gateway.roster.serving_workers(MODEL))
    return running


async def until_waiting(gateway: DispatchHarness, placement: int = 1) -> None:
    async def waits() -> bool:
        where = await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(placement))
        return where == "waiting"

    await until(waits, "a waiting job", DEADLINE_S)


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


class TestWaiting:
    async def test_the_only_worker_is_replaced_after_a_while(self, gateway: DispatchHarness) -> None:
        only = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(only, await job_of(only), [9], finish=None)
        await only.stop()
        await until_waiting(gateway, 2)
        restarted = await gateway.add_worker("decode-0", 2)
        again = await job_of(restarted)
        assert unpack_ids(again.shown) == [9]
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


class Away:
    """Redis is away while entered: calls of the job queue and the registry fail."""

    def __init__(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gateway = gateway
        self._patch = monkeypatch.context()
        self.num_places = 0
        self.num_withdrawals = 0

    def __enter__(self) -> "Away":
        patch = self._patch.__enter__()
        for name in ("whereabouts", "beat_gateway"):
            patch.setattr(self._gateway.broker.jobs, name, self._fail)
        patch.setattr(self._gateway.broker.jobs, "withdraw", self._fail_withdraw)
        patch.setattr(self._gateway.broker.jobs, "place", self._fail_place)
        patch.setattr(self._gateway.broker.registry, "workers", self._fail)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(None, None, None)

    async def _fail(self, *arguments: object) -> object:
        raise BrokerUnavailable("away")

    async def _fail_withdraw(self, *arguments: object) -> object:
        self.num_withdrawals += 1
        raise BrokerUnavailable("away")

    async def _fail_place(self, *arguments: object) -> object:
        self.num_places += 1
        raise BrokerUnavailable("away")


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
    return replace(job, placement=PlacementNumber(2), shown=pack_ids(shown))


class TestCancelById:
    async def test_a_running_request_ends(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        answer(worker, job, [9], finish=None)
        await until(lambda: gateway.dispatcher._streams[RequestId("r")].shown)
        assert gateway.dispatcher.cancel(RequestId("r"))
        with pytest.raises(RequestCancelled):
            await running
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("r", 1)
        assert not gateway.dispatcher.cancel(RequestId("r"))

    async def test_a_waiting_request_ends(self, gateway: DispatchHarness) -> None:
        await gateway.add_worker("decode-0", seats=0)
        running = asyncio.create_task(gateway.collect(make_request()))
        await until_waiting(gateway)
        assert gateway.dispatcher.cancel(RequestId("r"))
        with pytest.raises(RequestCancelled):
            await running

        async def is_gone() -> bool:
            return await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(1)) == "unknown"

        await until(is_gone)

    async def test_an_unknown_one_does_not(self, gateway: DispatchHarness) -> None:
        assert not gateway.dispatcher.cancel(RequestId("nobody"))


class TestNamedWorker:
    async def test_it_gets_the_request_whatever_is_held_against_it(self, gateway: DispatchHarness) -> None:
        await gateway.add_worker("decode-0", 1)
        doubted = await gateway.add_worker("decode-1", 2)
        await doubted.beat(num_running=2)
        gateway.dispatcher.proofs.miss(source_of(doubted), "a canary died")
        running = asyncio.create_task(gateway.collect(make_request(worker=doubted)))
        answer(doubted, await job_of(doubted), [9, 10])
        await running
        assert gateway.dispatcher.proofs.is_trusted(source_of(doubted))

    async def test_without_room_it_does_not_wait(self, gateway: DispatchHarness) -> None:
        full = await gateway.add_worker("decode-0", 1, seats=1)
        other = await gateway.add_worker("decode-1", 2)
        await full.beat(num_running=1)
        with pytest.raises(Overloaded, match="no room"):
            await gateway.collect(make_request(worker=full))
        await other.beat()
        assert other.jobs.empty()

    async def test_its_loss_is_the_end(self, gateway: DispatchHarness) -> None:
        named = await gateway.add_worker("decode-0", 1)
        other = await gateway.add_worker("decode-1", 2)
        running = asyncio.create_task(gateway.collect(make_request(worker=named)))
        answer(named, await job_of(named), [9], finish=None)
        await named.stop()
        with pytest.raises(WorkerLost):
            await running
        assert other.jobs.empty()


class TestTrust:
    async def test_a_doubted_worker_gets_no_work(self, gateway: DispatchHarness) -> None:
        doubted = await gateway.add_worker("decode-0", 1)
        trusted = await gateway.add_worker("decode-1", 2)
        await trusted.beat(num_running=2)
        gateway.dispatcher.proofs.miss(source_of(doubted), "a canary died")
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(trusted, await job_of(trusted), [9])
        await running

    async def test_doubted_workers_are_better_than_none(self, gateway: DispatchHarness) -> None:
        doubted = await gateway.add_worker("decode-0", 1)
        gateway.dispatcher.proofs.miss(source_of(doubted), "a canary died")
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(doubted, await job_of(doubted), [9])
        await running

    @pytest.mark.parametrize(("ids", "is_proof"), [([9], False), ([9, 10], True)])
    async def test_an_answer_of_two_tokens_is_a_proof(
        self, gateway: DispatchHarness, ids: list[int], is_proof: bool
    ) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        answer(worker, await job_of(worker), ids)
        await running
        assert (gateway.dispatcher.proofs.age_s(source_of(worker)) is not None) == is_proof
