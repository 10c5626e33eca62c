"""A decode worker without an engine: a real gRPC listener, a real feed, and a test that says what it answers."""

import asyncio

from common.errors import BrokerUnavailable
from common.messages.ids import (
    ChoiceIndex,
    EntryId,
    Epoch,
    Fingerprint,
    GatewayId,
    ModelName,
    PlacementNumber,
    RequestId,
    WorkerId,
)
from common.messages.job import Job
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerRecord
from common.rpc.server import bind, make_server
from common.runtime.feeds import FeedHub
from common.runtime.servicer import GatewayServicer
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import add_WorkerServicer_to_server
from tests.support.broker_harness import Broker
from tests.support.broker_records import FINGERPRINT
from tests.support.byte_link import ByteLink

SECRET = "a secret for tests"
MODEL = ModelName("m")
RETRY_S = 0.05


class ScriptedWorker:
    """Takes jobs from the broker; `jobs`, `cancels` (of placements), `choice_cancels` and `prompts` are what gateways
    sent, in order."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        epoch: int,
        *,
        num_blocks: int = 100,
        seats: int = 4,
        fingerprint: Fingerprint = FINGERPRINT,
        link: ByteLink | None = None,
    ) -> None:
        self.link = link
        """What gateways must pass to reach us, if anything."""
        self._broker = broker
        self.worker = WorkerId(name)
        self.epoch = Epoch(epoch)
        self.num_blocks = num_blocks
        self.seats = seats
        self.fingerprint = fingerprint
        self.feeds = FeedHub(lambda gateway: None)
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()
        self.cancels: asyncio.Queue[tuple[RequestId, PlacementNumber]] = asyncio.Queue()
        self.choice_cancels: asyncio.Queue[tuple[RequestId, PlacementNumber, ChoiceIndex]] = asyncio.Queue()
        self.prompts: asyncio.Queue[bytes] = asyncio.Queue()
        self._absorbed: EntryId | None = None
        self._server = make_server(SECRET)
        self._reading: asyncio.Task[None] | None = None
        self.record: WorkerRecord

    async def start(self) -> "ScriptedWorker":
        """Listen, register and read jobs."""
        add_WorkerServicer_to_server(GatewayServicer(self.epoch, self.feeds, self), self._server)
        port = bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        if self.link is not None:
            port = await self.link.start(port)
        self.record = WorkerRecord(
            worker=self.worker,
            role=Role.DECODE,
            epoch=self.epoch,
            model=MODEL,
            fingerprint=self.fingerprint,
            address=f"127.0.0.1:{port}",
            pid=1,
            num_blocks=self.num_blocks,
            block_size=16,
            max_context=1024,
            max_sequences=self.seats,
        )
        await self.beat()
        self._reading = asyncio.create_task(self._read())
        return self

    async def beat(
        self, *, num_running: int = 0, health: WorkerHealth = WorkerHealth.READY, is_exclusive: bool = False
    ) -> None:
        """Tell the registry our load; what has been read is absorbed."""
        load = WorkerLoad(
            health=health,
            is_exclusive=is_exclusive,
            blocks_total=self.num_blocks,
            blocks_free=self.num_blocks,
            num_running=num_running,
            absorbed=self._absorbed,
        )
        await self._broker.registry.beat(self.record, load)

    async def stop(self, *, leaves: bool = True) -> None:
        """Die: connections break, and the registry forgets us if `leaves`."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._server.stop(grace=None)
        if self.link is not None:
            await self.link.close()
        if leaves:
            await self._broker.registry.leave(self.worker, self.epoch)

    def cancel(self, request: RequestId, placement: PlacementNumber) -> None:
        """A gateway cancels."""
        self.cancels.put_nowait((request, placement))

    def cancel_choice(self, request: RequestId, placement: PlacementNumber, choice: ChoiceIndex) -> None:
        """A gateway needs no more of one choice."""
        self.choice_cancels.put_nowait((request, placement, choice))

    def supply_prompt(self, request: RequestId, placement: PlacementNumber, ids: bytes) -> bool:
        """A gateway brings a long prompt."""
        self.prompts.put_nowait(ids)
        return True

    def accept(self, job: Job) -> None:
        """Confirm a job."""
        self.send(job, accepted=pb.Accepted(needs_prompt=job.prompt is None))

    def send(
        self,
        job: Job,
        *,
        accepted: pb.Accepted | None = None,
        tokens: pb.Tokens | None = None,
        finished: pb.Finished | None = None,
        failed: pb.Failed | None = None,
        try_lost: pb.TryLost | None = None,
    ) -> None:
        """Send one event about a job to its gateway."""
        event = pb.FeedEvent(
            request=job.request,
            placement=job.placement,
            accepted=accepted,
            tokens=tokens,
            finished=finished,
            failed=failed,
            try_lost=try_lost,
        )
        self.feeds.push(GatewayId(job.gateway), event)

    async def _read(self) -> None:
        while True:
            try:
                queued = await self._broker.jobs.read(self.worker, self.epoch, self._absorbed, 1.0)
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            for item in queued:
                self._absorbed = item.entry
                self.jobs.put_nowait(item.job)
