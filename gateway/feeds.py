"""The gateway's ends of the event feeds: one stream from every worker incarnation that the registry lists.

Workers are judged by these connections, not by Redis: a feed that breaks or falls silent loses its worker's requests.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import grpc

from common.messages.ids import GatewayId
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from gateway.streams import Source
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import WorkerAsyncStub

logger = logging.getLogger(__name__)

SILENCE_S = 4.0
"""Workers send an empty frame every second; four missed ones are a dead or frozen worker."""

RECONNECT_S = 0.25


class Feeds:
    """All feeds of one gateway."""

    def __init__(
        self,
        gateway: GatewayId,
        channels: Channels,
        on_event: Callable[[Source, pb.FeedEvent], None],
        on_lost: Callable[[Source, str], None],
    ) -> None:
        self._gateway = gateway
        self._channels = channels
        self._on_event = on_event
        self._on_lost = on_lost
        self._records: dict[Source, WorkerRecord] = {}
        self._tasks: dict[Source, asyncio.Task[None]] = {}
        self._connected: set[Source] = set()

    def follow(self, records: Iterable[WorkerRecord]) -> None:
        """Follow exactly these workers; feeds of others end once they break."""
        self._records = {Source(record.worker, record.epoch): record for record in records}
        for source in self._records.keys() - self._tasks.keys():
            task = asyncio.create_task(self._follow(source), name=f"feed-{source.worker}")
            self._tasks[source] = task
            task.add_done_callback(partial(self._forget, source))

    def is_connected(self, source: Source) -> bool:
        """Whether events of that worker would reach us now."""
        return source in self._connected

    def record(self, source: Source) -> WorkerRecord | None:
        """Return what the registry says of that worker, None if it is not known (any more)."""
        return self._records.get(source)

    def stub(self, source: Source) -> "WorkerAsyncStub | None":
        """Return a client of that worker, None if it is not known (any more)."""
        record = self._records.get(source)
        return None if record is None else WorkerStub(self._channels.channel(record.address, record.epoch))

    async def close(self) -> None:
        """End every feed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, source: Source, _: asyncio.Task[None]) -> None:
        self._tasks.pop(source, None)

    async def _follow(self, source: Source) -> None:
        while (record := self._records.get(source)) is not None:
            try:
                await self._read(source, record)
                reason = "the feed ended"
            except TimeoutError:
                reason = f"no sign of life for {SILENCE_S:.0f} s"
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
            finally:
                was_connected = source in self._connected
                self._connected.discard(source)
            if was_connected:
                logger.warning("lost %s: %s", source.worker, reason)
                self._on_lost(source, f"{source.worker} is gone ({reason})")
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, source: Source, record: WorkerRecord) -> None:
        stub = WorkerStub(self._channels.channel(record.address, record.epoch))
        call = stub.Feed(pb.FeedRequest(gateway=self._gateway, epoch=record.epoch))
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frame = await call.read()
                if not isinstance(frame, pb.FeedFrame):
                    return  # end of stream
                self._connected.add(source)
                for event in frame.events:
                    self._on_event(source, event)
        finally:
            call.cancel()
