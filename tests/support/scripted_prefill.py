"""A prefill worker that says exactly what a test tells it to: its registry row, listener and pages are real."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from common.broker.memory_broker import MemoryBroker
from common.broker.protocols import Delivery
from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import Epoch, WorkerId
from common.messages.job import PrefillTask
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerRecord
from common.rpc.channels import Channels
from common.rpc.server import bind, make_server
from common.transfer.memory import InProcessTransfer
from common.transfer.pool_memory import PoolMemory
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import DecodeStub, PrefillServicer, add_PrefillServicer_to_server
from tests.support.broker_records import FINGERPRINT, MODEL
from tests.support.tagged_pages import BLOCK_SIZE, LAYOUT, TAG_BYTES

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import DecodeAsyncStub

NUM_BLOCKS = 32


class ScriptedPrefill(PrefillServicer):
    """One incarnation. Answers renewals while `holds`; everything it is told is kept."""

    def __init__(self, broker: MemoryBroker, transfer: InProcessTransfer, secret: str, name: str = "prefill-x") -> None:
        self._broker = broker
        self._name = name
        self._epoch = Epoch(secrets.randbits(62))
        self._memory = PoolMemory.create(LAYOUT, NUM_BLOCKS, self._epoch)
        self._source = transfer.source(self._memory)
        self._server = make_server(secret)
        self._channels = Channels(secret)
        self.record: WorkerRecord
        self.holds = True
        self.is_stalled = False
        self.is_answering = asyncio.Event()
        """Renewals wait for it; set at first."""
        self.is_answering.set()
        self.num_renewals = 0
        self.released: list[tuple[str, int, int]] = []

    async def start(self, *, epoch: Epoch | None = None, port: int = 0, fingerprint: str = FINGERPRINT) -> None:
        """Listen and appear in the registry as ready."""
        add_PrefillServicer_to_server(self, self._server)
        port = bind(self._server, "127.0.0.1", port)
        await self._server.start()
        self.record = WorkerRecord(
            worker=WorkerId(self._name),
            role=Role.PREFILL,
            epoch=epoch or self._epoch,
            model=MODEL,
            fingerprint=fingerprint,  # type: ignore[arg-type]  # a test's own
            address=f"127.0.0.1:{port}",
            pid=1,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_context=128,
            max_sequences=8,
            transfer=await self._source.start(),
        )
        await self._broker.registry.beat(self.record, WorkerLoad(health=WorkerHealth.READY))

    async def stop(self) -> None:
        """Vanish: nobody is told."""
        await self._source.close()
        await self._channels.close()
        await self._server.stop(None)

    async def stop_listening(self) -> None:
        """Die as far as its callers can tell."""
        await self._server.stop(None)

    @property
    def pages(self) -> memoryview:
        """The bytes of the whole pool."""
        return self._memory.pages

    async def claim(self) -> Delivery:
        """Take the next task."""
        delivery = await self._broker.tasks(FINGERPRINT).claim(self.record.worker, self.record.epoch, 5.0)
        assert delivery is not None
        return delivery

    def author(self, task: PrefillTask, records: Iterable[WorkerRecord]) -> WorkerRecord:
        """Return the row of the task's author."""
        return next(record for record in records if record.epoch == task.author_epoch)

    async def bind(self, decode: WorkerRecord, binding: pb.Binding, fingerprint: str = FINGERPRINT) -> pb.BindReply:
        """Send a bind."""
        request = pb.BindRequest(
            binding=binding, worker=self.record.worker, epoch=self.record.epoch, fingerprint=fingerprint
        )
        return await self._stub(decode).Bind(request, timeout=5)

    async def announce(
        self, decode: WorkerRecord, binding: pb.Binding, pages: Iterable[pb.PageRef], epoch: int | None = None
    ) -> "pb.Verdict.ValueType":
        """Send an announcement."""
        request = pb.AnnounceRequest(binding=binding, epoch=epoch or self.record.epoch, pages=pages)
        return (await self._stub(decode).Announce(request, timeout=5)).verdict

    async def commit(
        self,
        decode: WorkerRecord,
        binding: pb.Binding,
        token: int = 0,
        failure: str = "",
        epoch: int | None = None,
        **fields: Any,
    ) -> "pb.Verdict.ValueType":
        """Send a commit."""
        request = pb.CommitRequest(
            binding=binding, epoch=epoch or self.record.epoch, token=token, failure=failure, **fields
        )
        return (await self._stub(decode).Commit(request, timeout=5)).verdict

    def compute(self, ids: Sequence[int], first_page: int = 0) -> list[pb.PageRef]:
        """Write the pages of a prompt from `first_page` on; return the references to all of them."""
        chain = EMPTY_CHAIN
        for position, token in enumerate(ids):
            chain = extend_chain(chain, token)
            start = (first_page * BLOCK_SIZE + position) * TAG_BYTES
            self._memory.pages[start : start + TAG_BYTES] = chain.to_bytes(TAG_BYTES, "little")
        return [
            pb.PageRef(block_index=index, page=first_page + index, generation=self.generation(first_page + index))
            for index in range(-(-len(ids) // BLOCK_SIZE))
        ]

    def generation(self, page: int) -> int:
        """Return the generation of a page."""
        return self._memory.generations[page]

    def reuse(self, pages: Iterable[pb.PageRef]) -> None:
        """Let other content into the pages, as their owner does: first the generation, then the bytes."""
        for page in pages:
            self._memory.generations[page.page] += 1
            start = page.page * BLOCK_SIZE * TAG_BYTES
            self._memory.pages[start : start + BLOCK_SIZE * TAG_BYTES] = b"\xee" * (BLOCK_SIZE * TAG_BYTES)

    async def Renew(  # noqa: N802 - named by the service
        self, request: pb.RenewRequest, context: "grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewReply]"
    ) -> pb.RenewReply:
        """Answer as told."""
        self.num_renewals += 1
        await self.is_answering.wait()
        unknown = [] if self.holds else request.bindings
        return pb.RenewReply(unknown=unknown, epoch=self.record.epoch, is_stalled=self.is_stalled)

    async def Release(  # noqa: N802 - named by the service
        self, request: pb.ReleaseRequest, context: "grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseReply]"
    ) -> pb.ReleaseReply:
        """Take note."""
        self.released += [(b.request, b.placement, b.try_number) for b in request.bindings]
        return pb.ReleaseReply()

    def _stub(self, decode: WorkerRecord) -> "DecodeAsyncStub":
        return DecodeStub(self._channels.channel(decode.address, decode.epoch))


def binding_of(task: PrefillTask, *, placement: int | None = None, try_number: int | None = None) -> pb.Binding:
    """Return the binding of a task, or one that differs as told."""
    return pb.Binding(
        request=task.request,
        placement=task.placement if placement is None else placement,
        try_number=task.try_number if try_number is None else try_number,
    )
