"""The dispatcher over real feeds and scripted workers: placement, acceptance, failover, cancels, long prompts."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from common.broker.memory_broker import MemoryBroker, MemoryModelIndex
from common.errors import GenerationFailed, InvalidLogits, InvalidRequest, Overloaded, WorkerLost
from common.messages.chain import chain_of
from common.messages.codec import pack_ids, unpack_ids
from common.messages.ids import GatewayId, PlacementNumber, RequestId
from common.messages.job import Job
from common.messages.sampling import SamplingParams
from common.rpc.channels import Channels
from common.telemetry.metrics import GatewayMetrics
from gateway import dispatch as dispatch_module
from gateway import roster as roster_module
from gateway.dispatch import Dispatcher
from gateway.engine import EndOfStream, FinishReason, GenerateEvent, GenerateRequest, TokenDelta
from gateway.feeds import Feeds
from gateway.roster import ModelView, Roster
from gateway.streams import Source
from proto import worker_pb2 as pb
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, SECRET, ScriptedWorker

DEADLINE_S = 5.0


class Gateway:
    """A dispatcher over a memory broker, with any number of scripted workers."""

    def __init__(self) -> None:
        index = MemoryModelIndex()
        self.broker = MemoryBroker(MODEL, index=index)
        metrics = GatewayMetrics(CollectorRegistry())
        self.dispatcher = Dispatcher(GatewayId("g"), 2, metrics)
        self.channels = Channels(SECRET)
        self.feeds = Feeds(GatewayId("g"), self.channels, self.dispatcher.take, self.dispatcher.lose)
        view = ModelView(self.broker.registry, self.broker.jobs)
        self.roster = Roster(GatewayId("g"), self.feeds, index.models, lambda model: view, metrics)
        self.dispatcher.attach(self.roster, self.feeds)
        self._watching = asyncio.create_task(self.roster.watch())
        self._workers: list[ScriptedWorker] = []

    async def add_worker(self, name: str, epoch: int = 1, *, num_blocks: int = 100, seats: int = 4) -> ScriptedWorker:
        """Start a worker and wait until its feed is connected."""
        worker = await ScriptedWorker(self.broker, name, epoch, num_blocks=num_blocks, seats=seats).start()
        self._workers.append(worker)
        await until(lambda: self.feeds.is_connected(Source(worker.worker, worker.epoch)))
        return worker

    async def close(self) -> None:
        """Stop everything."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.dispatcher.close()
        await self.feeds.close()
        for worker in self._workers:
            await worker.stop()
        await self.channels.close()


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    """A gateway with quick timers."""
    monkeypatch.setattr(roster_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(dispatch_module, "ACCEPT_CHECK_S", 0.05)
    running = Gateway()
    yield running
    await running.close()


def make_request(prompt: list[int] | None = None, *, max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, stop_ids=(2,))
    return GenerateRequest(RequestId("r"), MODEL, prompt or [5, 6, 7], sampling)


def answer(worker: ScriptedWorker, job: Job, ids: list[int], *, finish: str | None = "length") -> None:
    """Accept, send the ids that come after what was shown, finish."""
    worker.accept(job)
    shown = unpack_ids(job.shown)
    worker.send(job, tokens=pb.Tokens(index=len(shown), ids=ids, chain=chain_of(shown)))
    if finish is not None:
        worker.send(job, finished=pb.Finished(reason=finish, num_generated=len(shown) + len(ids)))


async def collect(gateway: Gateway, request: GenerateRequest) -> list[GenerateEvent]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in gateway.dispatcher.generate(request)]


async def job_of(worker: ScriptedWorker) -> Job:
    async with asyncio.timeout(DEADLINE_S):
        return await worker.jobs.get()


def ids_of(events: list[GenerateEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]


async def test_a_request_is_placed_and_streamed(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    job = await job_of(worker)
    assert job.prompt is not None
    assert unpack_ids(job.prompt) == [5, 6, 7]
    answer(worker, job, [9, 10])
    assert await running == [TokenDelta(0, (9, 10)), EndOfStream(FinishReason.LENGTH, 2)]
    assert gateway.dispatcher.num_streams == 0
    assert worker.cancels.empty()


async def test_without_a_worker_it_is_refused_at_once(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    await worker.stop()
    await until(lambda: not gateway.roster.decode_workers(MODEL))
    with pytest.raises(Overloaded) as refusal:
        await collect(gateway, make_request())
    assert refusal.value.retry_after_s > 0


async def test_a_long_prompt_travels_directly(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0", num_blocks=200)
    prompt = list(range(2000))
    running = asyncio.create_task(collect(gateway, make_request(prompt)))
    job = await job_of(worker)
    assert job.prompt is None
    assert job.num_prompt_tokens == 2000
    worker.accept(job)
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.prompts.get() == pack_ids(prompt)
    answer(worker, job, [9])
    assert ids_of(await running) == [9]


async def test_b057_a_prompt_beyond_every_pool_is_refused_with_both_numbers(gateway: Gateway) -> None:
    await gateway.add_worker("decode-0", num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"64 tokens.*|.*100 tokens.*64") as refusal:
        await collect(gateway, make_request(list(range(100))))
    assert "100" in refusal.value.message


async def test_a_lost_worker_is_replaced_and_the_stream_continues(gateway: Gateway) -> None:
    first = await gateway.add_worker("decode-0", 1)
    running = asyncio.create_task(collect(gateway, make_request()))
    job = await job_of(first)
    answer(first, job, [9, 10], finish=None)
    second = await gateway.add_worker("decode-1", 2)
    await first.stop()
    again = await job_of(second)
    assert (again.placement, unpack_ids(again.shown)) == (2, [9, 10])
    answer(second, again, [11])
    events = await running
    assert ids_of(events) == [9, 10, 11]
    assert events[-1] == EndOfStream(FinishReason.LENGTH, 3)


async def test_an_unaccepted_job_is_placed_again(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    lost = await job_of(worker)
    await worker.beat()  # absorbed, but never confirmed
    again = await job_of(worker)
    assert (lost.placement, again.placement) == (1, 2)
    answer(worker, again, [9])
    assert ids_of(await running) == [9]


async def test_a_diverging_worker_is_cancelled_and_shown_tokens_win(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    worker.send(job, tokens=pb.Tokens(index=1, ids=[10], chain=chain_of([8])))
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.cancels.get() == ("r", 1)
    again = await job_of(worker)
    assert unpack_ids(again.shown) == [9]
    answer(worker, again, [11])
    assert ids_of(await running) == [9, 11]


async def test_the_failure_budget_ends_in_one_error(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    for placement in (1, 2, 3):
        job = await job_of(worker)
        assert job.placement == placement
        worker.accept(job)
        worker.send(job, failed=pb.Failed(message="draining", code="worker_draining", is_retryable=True))
        await worker.beat()
    with pytest.raises(WorkerLost, match="3 times"):
        await running


@pytest.mark.parametrize(
    ("code", "error"),
    [("invalid_logits", InvalidLogits), ("too_long", InvalidRequest), ("internal", GenerationFailed)],
)
async def test_a_final_failure_is_not_retried(gateway: Gateway, code: str, error: type[Exception]) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    job = await job_of(worker)
    worker.accept(job)
    worker.send(job, failed=pb.Failed(message="no", code=code))
    with pytest.raises(error):
        await running
    assert worker.jobs.empty()


async def test_closing_the_generator_cancels_at_the_worker(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    events = gateway.dispatcher.generate(make_request())
    first = asyncio.ensure_future(anext(events))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    assert await first == TokenDelta(0, (9,))
    await events.aclose()
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.cancels.get() == ("r", 1)


async def test_a_cancelled_waiting_request_leaves_the_queue(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0", seats=1)
    await worker.beat(num_running=1)
    running = asyncio.create_task(collect(gateway, make_request()))

    async def is_at(where: str) -> bool:
        return await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(1)) == where

    await until(lambda: is_at("waiting"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: is_at("unknown"))
    await worker.beat(num_running=0)
    assert worker.jobs.empty()


async def test_a_late_acceptance_of_an_old_placement_is_cancelled(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request()))
    lost = await job_of(worker)
    await worker.beat()
    again = await job_of(worker)
    worker.accept(lost)
    async with asyncio.timeout(DEADLINE_S):
        while await worker.cancels.get() != ("r", 1):
            pass
    answer(worker, again, [9])
    assert ids_of(await running) == [9]


async def test_only_the_terminal_event_was_lost(gateway: Gateway) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(collect(gateway, make_request(max_tokens=2)))
    job = await job_of(worker)
    answer(worker, job, [9, 10], finish=None)
    await worker.stop()
    assert await running == [TokenDelta(0, (9, 10)), EndOfStream(FinishReason.LENGTH, 2)]
