"""Two versions of a model under one name, as during an upgrade: a request is answered by one of them alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from common.broker.memory_broker import MemoryBroker, MemoryModelIndex
from common.errors import WorkerLost
from common.messages.chain import chain_of
from common.messages.codec import unpack_ids
from common.messages.ids import Epoch, Fingerprint, GatewayId, RequestId, WorkerId
from common.messages.job import Job
from common.messages.registry import Role, WorkerHealth, WorkerLoad
from common.messages.sampling import SamplingParams
from common.rpc.channels import Channels
from common.telemetry.metrics import GatewayMetrics
from gateway import dispatch as dispatch_module
from gateway import roster as roster_module
from gateway.dispatch import Dispatcher
from gateway.engine import GenerateRequest, TokenDelta
from gateway.feeds import Feeds
from gateway.roster import ModelView, Roster
from gateway.streams import Source
from proto import worker_pb2 as pb
from tests.support.broker_records import make_card
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, SECRET, ScriptedWorker

DEADLINE_S = 5.0
OLD, NEW = Fingerprint("old"), Fingerprint("new")


class Upgrade:
    """A gateway and workers of both versions, each with one seat."""

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

    async def add_worker(self, fingerprint: Fingerprint) -> ScriptedWorker:
        """Start a worker and wait until its feed is connected."""
        number = len(self._workers) + 1
        worker = ScriptedWorker(self.broker, f"decode-{number}", number, seats=1, fingerprint=fingerprint)
        self._workers.append(await worker.start())
        await until(lambda: self.feeds.is_connected(Source(worker.worker, worker.epoch)))
        return worker

    async def ids(self, fingerprint: Fingerprint) -> list[int]:
        """Return the answer to a request whose ids that version's tokenizer has made."""
        sampling = SamplingParams(seed=1, max_tokens=8, stop_ids=(2,))
        request = GenerateRequest(RequestId("r"), MODEL, [5, 6, 7], sampling, fingerprint=fingerprint)
        async with asyncio.timeout(DEADLINE_S):
            events = [event async for event in self.dispatcher.generate(request)]
        return [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]

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
async def upgrade(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upgrade]:
    """A gateway with quick timers."""
    monkeypatch.setattr(roster_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(dispatch_module, "ACCEPT_CHECK_S", 0.05)
    running = Upgrade()
    yield running
    await running.close()


async def job_of(worker: ScriptedWorker) -> Job:
    async with asyncio.timeout(DEADLINE_S):
        return await worker.jobs.get()


def answer(worker: ScriptedWorker, job: Job, ids: list[int], *, finishes: bool = True) -> None:
    """Accept the job and send the ids that come after what was shown."""
    worker.accept(job)
    shown = unpack_ids(job.shown)
    worker.send(job, tokens=pb.Tokens(index=len(shown), ids=ids, chain=chain_of(shown)))
    if finishes:
        worker.send(job, finished=pb.Finished(reason="length", num_generated=len(shown) + len(ids)))


@pytest.mark.parametrize("version", [OLD, NEW])
async def test_a_request_goes_to_the_version_of_its_tokenizer(upgrade: Upgrade, version: Fingerprint) -> None:
    workers = {OLD: await upgrade.add_worker(OLD), NEW: await upgrade.add_worker(NEW)}
    running = asyncio.create_task(upgrade.ids(version))
    answer(workers[version], await job_of(workers[version]), [9])
    assert await running == [9]


async def test_a_stream_is_never_continued_by_another_version(upgrade: Upgrade) -> None:
    old = await upgrade.add_worker(OLD)
    new = await upgrade.add_worker(NEW)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(old, await job_of(old), [9], finishes=False)
    await old.stop()
    with pytest.raises(WorkerLost, match="another version"):
        await running
    assert new.jobs.empty()


async def test_a_stream_goes_on_at_its_own_version(upgrade: Upgrade) -> None:
    old = await upgrade.add_worker(OLD)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(old, await job_of(old), [9], finishes=False)
    await upgrade.add_worker(NEW)
    other_old = await upgrade.add_worker(OLD)
    await old.stop()
    answer(other_old, await job_of(other_old), [10])
    assert await running == [9, 10]


async def test_a_waiting_job_that_another_version_takes_is_placed_again(upgrade: Upgrade) -> None:
    old = await upgrade.add_worker(OLD)
    await old.beat(num_running=1)  # no seat is left: the request waits
    running = asyncio.create_task(upgrade.ids(OLD))
    new = await upgrade.add_worker(NEW)
    taken = await job_of(new)
    await old.beat()
    answer(new, taken, [8])
    again = await job_of(old)
    assert (again.placement, again.shown) == (2, b"")
    answer(old, again, [9])
    assert await running == [9]
    assert new.cancels.get_nowait() == ("r", 1)


async def test_without_the_own_version_any_may_answer_from_the_start(upgrade: Upgrade) -> None:
    new = await upgrade.add_worker(NEW)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(new, await job_of(new), [9])
    assert await running == [9]


async def test_the_card_follows_the_decode_workers(upgrade: Upgrade) -> None:
    """A prefill worker of the old version does not keep its tokenizer in use."""
    old = await upgrade.add_worker(OLD)
    await upgrade.broker.registry.publish_card(replace(make_card(), fingerprint=OLD))
    await until(lambda: [card.fingerprint for card in upgrade.roster.cards()] == [OLD])
    prefill = replace(old.record, worker=WorkerId("prefill-1"), epoch=Epoch(9), role=Role.PREFILL)
    await upgrade.broker.registry.beat(prefill, WorkerLoad(health=WorkerHealth.READY))
    await upgrade.add_worker(NEW)
    await upgrade.broker.registry.publish_card(replace(make_card(), fingerprint=NEW))
    await old.stop()
    await until(lambda: [card.fingerprint for card in upgrade.roster.cards()] == [NEW])
