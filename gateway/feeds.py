"""The gateway's ends of the event feeds: one stream from every worker incarnation that the registry lists.

Workers are judged by these connections, not by Redis: a feed that breaks, falls silent or tells of a stalled engine
loses its worker's requests. Nobody is judged for a pause of this process.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import grpc

from common.messages.ids import GatewayId
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from gateway.losses import LossReason, PlacementLost
from gateway.silence import LOOK_S, SilenceWatch
from gateway.streams import Source
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import WorkerAsyncStub

logger = logging.getLogger(__name__)

SILENCE_S = 4.0
"""Workers send an empty frame every second; four missed ones are a dead or frozen worker."""

RECONNECT_S = 0.25


class FeedListener(Protocol):
    """Hears what comes from the feeds."""

    def take(self, source: Source, event: pb.FeedEvent) -> None:
        """An event has come."""

    def lose(self, source: Source, loss: PlacementLost) -> None:
        """A worker's requests are lost."""

    def meet(self, source: Source) -> None:
        """A worker can be talked to (again)."""


class Feeds:
    """All feeds of one gateway. `clock` returns seconds."""

    def __init__(
        self,
        gateway: GatewayId,
        channels: Channels,
        listener: FeedListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._channels = channels
        self._listener = listener
        self._clock = clock
        self._records: dict[Source, WorkerRecord] = {}
        self._left: dict[Source, WorkerRecord] = {}
        self._tasks: dict[Source, asyncio.Task[None]] = {}
        self._calls: dict[Source, asyncio.Timeout] = {}
        self._connected: set[Source] = set()
        self._silence: SilenceWatch[Source] = SilenceWatch(SILENCE_S)
        self._judge: asyncio.Task[None] | None = None

    def follow(self, records: Iterable[WorkerRecord]) -> None:
        """Follow exactly these workers; feeds of others end once they break."""
        self._judge = self._judge or asyncio.create_task(self._judge_silence(), name="silence")
        known = self._left | self._records
        self._records = {Source(record.worker, record.epoch): record for record in records}
        self._left = {source: known[source] for source in known.keys() & self._connected - self._records.keys()}
        for source in self._records.keys() - self._tasks.keys():
            task = asyncio.create_task(self._follow(source), name=f"feed-{source.worker}")
            self._tasks[source] = task
            task.add_done_callback(partial(self._forget, source))

    def is_connected(self, source: Source) -> bool:
        """Whether events of that worker would reach us now, and its engine makes progress."""
        return source in self._connected

    def record(self, source: Source) -> WorkerRecord | None:
        """Return what the registry says of that worker, or has said of one that left it and is still connected: one
        that drains has requests of ours. None if it is not known (any more)."""
        left = self._left.get(source) if source in self._connected else None
        return self._records.get(source) or left

    def stub(self, source: Source) -> "WorkerAsyncStub | None":
        """Return a client of that worker, None if it is not known (any more)."""
        record = self.record(source)
        return None if record is None else WorkerStub(self._channels.channel(record.address, record.epoch))

    async def close(self) -> None:
        """End every feed."""
        tasks = [*self._tasks.values(), *([self._judge] if self._judge is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, source: Source, task: asyncio.Task[None]) -> None:
        self._tasks.pop(source, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the feed of %s ended by a mistake of ours", source.worker, exc_info=error)

    async def _follow(self, source: Source) -> None:
        while (record := self._records.get(source)) is not None:
            try:
                reason = await self._read(source, record)
            finally:
                self._silence.forget(source)
            # A connection that broke while we were paused may have been given up by its worker for our silence.
            is_failure = not self._silence.was_paused(self._clock())
            self._lose(source, LossReason.LOST, f"{source.worker} is gone ({reason})", is_failure=is_failure)
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, source: Source, record: WorkerRecord) -> str:
        """Take frames until the feed breaks; return the reason."""
        self._silence.heard(source, self._clock())
        stub = WorkerStub(self._channels.channel(record.address, record.epoch))
        call = stub.Feed(pb.FeedRequest(gateway=self._gateway, epoch=record.epoch))
        try:
            async with asyncio.timeout(None) as self._calls[source]:  # ended by the judge
                while isinstance(frame := await call.read(), pb.FeedFrame):
                    self._take(source, frame)
                return "the feed ended"
        except TimeoutError:
            return f"no sign of life for {SILENCE_S:.0f} s"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except grpc.aio.UsageError:
            return "its channel was dropped before the call"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "its channel was dropped"  # gRPC cancels the calls of a channel that is closed
        finally:
            del self._calls[source]
            call.cancel()

    def _take(self, source: Source, frame: pb.FeedFrame) -> None:
        self._silence.heard(source, self._clock())
        if not frame.is_stalled and source not in self._connected:
            self._connected.add(source)
            self._listener.meet(source)
        for event in frame.events:
            self._listener.take(source, event)
        if frame.is_stalled:
            self._lose(source, LossReason.STALLED, f"{source.worker} makes no progress")

    def _lose(self, source: Source, reason: LossReason, text: str, *, is_failure: bool = True) -> None:
        """Tell of a loss, once until the worker is met again."""
        if source in self._connected:
            self._connected.discard(source)
            logger.warning("lost %s: %s", source.worker, text)
            self._listener.lose(source, PlacementLost(reason, text, is_failure))

    async def _judge_silence(self) -> None:
        while True:
            for source in self._silence.look(self._clock()):
                self._silence.forget(source)
                if (call := self._calls.get(source)) is not None:
                    call.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)
