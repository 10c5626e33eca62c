"""Which worker gets a request, by name and by trust; and the end of a request by its id."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from common.errors import Overloaded, RequestCancelled, WorkerLost
from common.messages.ids import PlacementNumber, RequestId, TenantId
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, job_of, quicken
from tests.support.dispatch_scenes import make_request, source_of, until_waiting
from tests.support.polling import until


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


class TestCancelById:
    async def test_a_running_request_ends(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0")
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(worker)
        answer(worker, job, [9], finish=None)
        await until(lambda: gateway.shown("r"))
        assert gateway.dispatcher.cancel(RequestId("r"))
        with pytest.raises(RequestCancelled):
            await running
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("r", 1)
        assert not gateway.dispatcher.cancel(RequestId("r"))

    async def test_b139_a_tenant_ends_its_own_alone(self, gateway: DispatchHarness) -> None:
        await gateway.add_worker("decode-0", seats=0)
        request = replace(make_request(), tenant=TenantId("key-a"))
        running = asyncio.create_task(gateway.collect(request))
        await until_waiting(gateway)
        assert not gateway.dispatcher.cancel(RequestId("r"))
        assert not gateway.dispatcher.cancel(RequestId("r"), TenantId("key-b"))
        assert gateway.dispatcher.cancel(RequestId("r"), TenantId("key-a"))
        with pytest.raises(RequestCancelled):
            await running

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

    async def test_giving_the_request_back_without_blame_is_no_loss_of_it(self, gateway: DispatchHarness) -> None:
        """A canary that makes room for a suspect request tells nothing against the worker: it is tried again later."""
        named = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request(worker=named)))
        job = await job_of(named)
        named.accept(job)
        named.send(job, failed=pb.Failed(message="another one runs alone", code="displaced", is_retryable=True))
        with pytest.raises(Overloaded, match="another one runs alone"):
            await running

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
