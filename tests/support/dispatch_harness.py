"""A dispatcher over a memory broker and real feeds, with any number of scripted workers."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from common.broker.memory_broker import MemoryBroker
from common.messages.chain import chain_of
from common.messages.codec import unpack_ids
from common.messages.ids import Fingerprint, GatewayId, RequestId
from common.messages.job import Job
from common.rpc.channels import Channels
from common.runtime import feeds as hub_module
from common.telemetry.metrics import GatewayMetrics
from gateway import cancelling as cancelling_module
from gateway import feeds as feeds_module
from gateway import placing as placing_module
from gateway import roster as roster_module
from gateway import silence as silence_module
from gateway.dispatch import Dispatcher
from gateway.engine import GenerateEvent, GenerateRequest, TokenDelta
from gateway.feeds import Feeds
from gateway.proofs import Proofs
from gateway.roster import ModelView, Roster
from gateway.streams import Source
from proto import worker_pb2 as pb
from tests.support.broker_harness import Broker
from tests.support.broker_records import FINGERPRINT
from tests.support.byte_link import ByteLink
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, SECRET, ScriptedWorker

DEADLINE_S = 20.0
MAX_FAILURES = 3


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timers of roster and dispatcher."""
    monkeypatch.setattr(roster_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(placing_module, "ACCEPT_CHECK_S", 0.05)


def quicken_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what makes a silent worker a lost one, on both sides."""
    monkeypatch.setattr(hub_module, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(feeds_module, "SILENCE_S", 0.5)
    monkeypatch.setattr(feeds_module, "LOOK_S", 0.05)
    monkeypatch.setattr(silence_module, "LOOK_S", 0.05)
    monkeypatch.setattr(silence_module, "TOLERANCE_S", 0.2)
    monkeypatch.setattr(silence_module, "GRACE_S", 0.3)
    monkeypatch.setattr(cancelling_module, "RPC_TIMEOUT_S", 0.3)


class DispatchHarness:
    """One gateway's cluster view and dispatcher; the third failure of a request ends it."""

    gateway = GatewayId("g")

    def __init__(self, broker: Broker | None = None, max_queue_s: float | None = None) -> None:
        self.broker = broker or MemoryBroker(MODEL)
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.dispatcher = Dispatcher(self.gateway, MAX_FAILURES, self.metrics, Proofs(60.0), max_queue_s=max_queue_s)
        self.channels = Channels(SECRET)
        self.feeds = Feeds(self.gateway, self.channels, self.dispatcher)
        view = ModelView(self.broker.registry, self.broker.jobs)
        self.roster = Roster(self.gateway, self.feeds, self.broker.index.models, lambda model: view, self.metrics)
        self.dispatcher.attach(self.roster, self.feeds)
        self._watching = asyncio.create_task(self.roster.watch())
        self._workers: list[ScriptedWorker] = []

    @property
    def num_workers(self) -> int:
        """Workers started so far."""
        return len(self._workers)

    async def add_worker(
        self,
        name: str,
        epoch: int = 1,
        *,
        num_blocks: int = 100,
        seats: int = 4,
        fingerprint: Fingerprint = FINGERPRINT,
        link: ByteLink | None = None,
    ) -> ScriptedWorker:
        """Start a worker and wait until its feed is connected."""
        worker = ScriptedWorker(
            self.broker, name, epoch, num_blocks=num_blocks, seats=seats, fingerprint=fingerprint, link=link
        )
        self._workers.append(await worker.start())
        await until(lambda: self.is_connected(worker), "its feed", DEADLINE_S)
        return worker

    def is_connected(self, worker: ScriptedWorker) -> bool:
        """Whether the gateway hears that worker."""
        return self.feeds.is_connected(Source(worker.worker, worker.epoch))

    def shown(self, request: str) -> list[int]:
        """Return the tokens that the gateway has taken of the first choice of a request."""
        return self.dispatcher._streams[RequestId(request)].choices.all[0].shown

    def count(self, metric: str, **labels: str) -> float:
        """Return a counter's value."""
        return self.metrics.registry.get_sample_value(f"tandem_{metric}_total", labels) or 0.0

    async def collect(self, request: GenerateRequest) -> list[GenerateEvent]:
        """Return all events of a request."""
        async with asyncio.timeout(DEADLINE_S):
            return [event async for event in self.dispatcher.generate(request)]

    async def close(self) -> None:
        """Stop everything."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.dispatcher.close()
        await self.feeds.close()
        for worker in self._workers:
            await worker.stop()
        await self.channels.close()


def answer(worker: ScriptedWorker, job: Job, ids: list[int], *, finish: str | None = "length") -> None:
    """Accept the job, send the ids that come after what was shown, finish."""
    worker.accept(job)
    shown = unpack_ids(job.choices[0].shown)
    worker.send(job, tokens=pb.Tokens(index=len(shown), ids=ids, chain=chain_of(shown)))
    if finish is not None:
        worker.send(job, finished=pb.Finished(reason=finish, num_generated=len(shown) + len(ids)))


async def job_of(worker: ScriptedWorker) -> Job:
    """Return the next job that the worker is given."""
    async with asyncio.timeout(DEADLINE_S):
        return await worker.jobs.get()


def ids_of(events: list[GenerateEvent]) -> list[int]:
    """Return the tokens among events."""
    return [token for event in events if isinstance(event, TokenDelta) for token in event.token_ids]
