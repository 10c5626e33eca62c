"""A decode worker that computes nothing: it takes real jobs from Redis and answers them on a real feed by the script.

Frames are put together out of bytes made before, so that a token costs this side about 0.3 us.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from bench.gateway.pacing import BURST, Pacer
from bench.gateway.script import FINGERPRINT, MAX_CONTEXT, MODEL, Script
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable
from common.lifecycle.epochs import new_epoch
from common.messages.ids import EntryId, RequestId, WorkerId
from common.messages.job import Job
from common.messages.prefixes import ID_BYTES
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerRecord
from common.rpc.server import bind, make_server
from proto import worker_pb2 as pb

WORKER = WorkerId("scripted-0")
SEATS = 4096
NUM_BLOCKS = 1 << 20
BEAT_S = 0.5
READ_BLOCK_S = 1.0
KEEP_ALIVE_S = 1.0
MAX_FRAME_EVENTS = 1024

EVENTS_TAG = b"\x0a"
"""Of field `events` of a `FeedFrame`."""

KEEP_ALIVE = b""
"""A frame without events."""


class Source:
    """One scripted worker; `start`, and `stop` in the end."""

    def __init__(self, broker: RedisBroker, secret: str, script: Script, pacer: Pacer) -> None:
        self.script = script
        self.pacer = pacer
        self._broker = broker
        self._epoch = new_epoch()
        self._server = make_server(secret)
        self._answers: dict[str, _Answer] = {}
        self._parts: list[bytes] = []
        self._news = asyncio.Event()
        self._absorbed: EntryId | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, register, and take jobs."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Feed": grpc.unary_stream_rpc_method_handler(
                self._feed, request_deserializer=pb.FeedRequest.FromString, response_serializer=bytes
            ),
            "Cancel": grpc.unary_unary_rpc_method_handler(
                self._cancel,
                request_deserializer=pb.CancelRequest.FromString,
                response_serializer=pb.CancelReply.SerializeToString,
            ),
        }
        service = grpc.method_handlers_generic_handler("tandem.worker.v1.Worker", handlers)
        self._server.add_generic_rpc_handlers((service,))
        port = bind(self._server, "127.0.0.1")
        await self._server.start()
        record = WorkerRecord(
            worker=WORKER,
            role=Role.DECODE,
            epoch=self._epoch,
            model=MODEL,
            fingerprint=FINGERPRINT,
            address=f"127.0.0.1:{port}",
            pid=1,
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_context=MAX_CONTEXT,
            max_sequences=SEATS,
        )
        await self._broker.registry.publish_card(self.script.card)
        await self._beat_once(record)
        self._tasks = [asyncio.create_task(self._beat(record)), asyncio.create_task(self._read())]

    async def stop(self) -> None:
        """Die: nothing more is taken, and the feed breaks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(grace=None)

    def send(self, *parts: bytes) -> None:
        """Put an event, in parts, into the next frame."""
        size = sum(map(len, parts))
        self._parts += (EVENTS_TAG, varint(size), *parts)
        self._news.set()

    def forget(self, answer: "_Answer") -> None:
        """It is over."""
        self._answers.pop(answer.request, None)
        self.pacer.remove(answer)

    async def _beat(self, record: WorkerRecord) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(BrokerUnavailable):  # the next one will do
                await self._beat_once(record)

    async def _beat_once(self, record: WorkerRecord) -> None:
        load = WorkerLoad(
            health=WorkerHealth.READY,
            blocks_total=NUM_BLOCKS,
            blocks_free=NUM_BLOCKS,
            num_running=len(self._answers),
            absorbed=self._absorbed,
        )
        await self._broker.registry.beat(record, load)

    async def _read(self) -> None:
        while True:
            try:
                items = await self._broker.jobs.read(WORKER, self._epoch, self._absorbed, READ_BLOCK_S)
            except BrokerUnavailable:
                await asyncio.sleep(BEAT_S)
                continue
            for item in items:
                self._absorbed = item.entry
                self._take(item.job)

    def _take(self, job: Job) -> None:
        answer = _Answer(self, job)
        self._answers[job.request] = answer
        answer.accept()
        if self.pacer.interval_s is not None:
            self.pacer.add(answer)
        else:
            answer.write(BURST)

    async def _cancel(self, request: pb.CancelRequest, _context: object) -> pb.CancelReply:
        answer = self._answers.get(request.request)
        if answer is not None:
            self.forget(answer)
        return pb.CancelReply()

    async def _feed(self, _request: pb.FeedRequest, _context: object) -> AsyncIterator[bytes]:
        """Yield frames; where nothing paces the answers, the next one is made when the last one was taken."""
        while True:
            if self.pacer.interval_s is None:
                self._write_on()
            if not self._parts:
                self._news.clear()
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await self._news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
                continue
            parts, self._parts = self._parts, []
            yield b"".join(parts)

    def _write_on(self) -> None:
        """Write a burst of each answer, of those that have waited longest first, until a frame is full."""
        for answer in list(itertools.islice(self._answers.values(), MAX_FRAME_EVENTS // BURST)):
            if answer.write(BURST):
                del self._answers[answer.request]
                self._answers[answer.request] = answer  # behind all others


class _Answer:
    """One job that is being answered."""

    def __init__(self, source: Source, job: Job) -> None:
        self.request: RequestId = job.request
        self.seed = job.sampling.seed
        self._source = source
        self._head = pb.FeedEvent(request=job.request, placement=job.placement).SerializeToString()
        self._num_wanted = job.sampling.max_tokens
        self._num_written = len(job.choices[0].shown) // ID_BYTES

    def accept(self) -> None:
        """Confirm the job."""
        accepted = pb.FeedEvent(accepted=pb.Accepted(needs_prompt=False))
        self._source.send(self._head, accepted.SerializeToString())

    def write(self, num_tokens: int) -> bool:
        """See `Outlet.write`."""
        first = self._num_written
        self._num_written = end = min(first + num_tokens, self._num_wanted)
        for event in self._source.script.feed_events[first:end]:
            self._source.send(self._head, event)
        if end < self._num_wanted:
            return True
        finished = pb.FeedEvent(finished=pb.Finished(reason="length", num_generated=end))
        self._source.send(self._head, finished.SerializeToString())
        self._source.forget(self)
        return False


def varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
