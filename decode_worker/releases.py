"""Tells prefill workers which bindings are over, and renews the leases of those that are not.

One task per prefill worker would be one connection each; here one sender batches per worker. Losing a release is
harmless: the lease ends.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import grpc

from common.errors import PeerError
from common.lifecycle.uninterrupted import uninterrupted
from common.messages.ids import Epoch, TryNumber, WorkerId
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.scheduling.sequence import SequenceKey
from decode_worker.reception import Attempt, TryLoss
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import PrefillStub

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import PrefillAsyncStub

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 1.0

GIVE_UP_SHARE = 0.75
"""Part of a lease without an answer after which we give up. Its holder waits for the whole of it, so we are first."""

REFUSED_SHARE = 1 / 6
"""Part of a lease in which every connection is refused, after which the holder is dead although the registry has not
noticed yet: with the default lease 1 s and four attempts to connect. A living process does not close its listener."""


def binding(key: SequenceKey, number: TryNumber) -> pb.Binding:
    """Return the wire name of a hand-over attempt."""
    return pb.Binding(request=key.request, placement=key.placement, try_number=number)


def stub_for(channels: Channels, record: WorkerRecord) -> "PrefillAsyncStub":
    """Return the client of a prefill worker."""
    return PrefillStub(channels.channel(record.address, record.epoch))


class Releases:
    """Sends the ends of bindings in the background."""

    def __init__(self, channels: Channels, epoch: Epoch) -> None:
        self._channels = channels
        self._epoch = epoch
        self._pending: dict[Epoch, tuple[WorkerRecord, list[pb.Binding]]] = {}
        self._wakeup = asyncio.Event()

    def add(self, source: WorkerRecord, key: SequenceKey, number: TryNumber) -> None:
        """Queue the end of one binding."""
        self._pending.setdefault(source.epoch, (source, []))[1].append(binding(key, number))
        self._wakeup.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wakeup.wait()
            await uninterrupted(self.flush())  # what is being sent when we leave arrives

    async def flush(self) -> None:
        """Send what is queued."""
        self._wakeup.clear()
        pending, self._pending = self._pending, {}
        await asyncio.gather(*(self._send(record, bindings) for record, bindings in pending.values()))

    async def _send(self, record: WorkerRecord, bindings: list[pb.Binding]) -> None:
        request = pb.ReleaseRequest(bindings=bindings, epoch=self._epoch)
        call = stub_for(self._channels, record).Release(request, timeout=RPC_TIMEOUT_S)
        try:
            await reply_from(record.worker, call)
        except PeerError as error:
            logger.info("release not delivered to %s", error)


class Leases:
    """Renews the bindings of running attempts and loses those whose holder is gone or does not answer in time.

    `is_listed` says whether the registry has that incarnation; `clock` (seconds) stands still while we are paused.
    """

    def __init__(
        self,
        channels: Channels,
        worker: WorkerId,
        epoch: Epoch,
        lease_s: float,
        attempts: Callable[[], Iterable[tuple[SequenceKey, Attempt]]],
        is_listed: Callable[[WorkerRecord], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = channels
        self._worker = worker
        self._epoch = epoch
        self._lease_s = lease_s
        self._attempts = attempts
        self._is_listed = is_listed
        self._clock = clock
        self._refusing: dict[Epoch, float] = {}
        """Holders where nobody listens, and since when."""
        self._wakeup = asyncio.Event()

    async def run(self) -> None:
        """Renew until cancelled, six times per lease, and more often where nobody seems to be left."""
        while True:
            interval_s = self._lease_s / (24 if self._refusing else 6)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wakeup.wait()
            self._wakeup.clear()
            await self.renew()

    def probe(self) -> None:
        """Renew at once: somebody could not be reached."""
        self._wakeup.set()

    async def renew(self) -> None:
        """Renew every bound attempt once."""
        by_epoch: dict[Epoch, list[tuple[SequenceKey, Attempt]]] = defaultdict(list)
        for key, attempt in self._attempts():
            if attempt.source is not None:
                by_epoch[attempt.source.epoch].append((key, attempt))
        self._refusing = {epoch: since for epoch, since in self._refusing.items() if epoch in by_epoch}
        await asyncio.gather(*(self._renew(held) for held in by_epoch.values()))

    async def _renew(self, held: list[tuple[SequenceKey, Attempt]]) -> None:
        source = held[0][1].source
        assert source is not None
        sent_at = self._clock()  # the holder counts from sending, the grantor from receipt: we give up first
        bindings = [binding(key, attempt.number) for key, attempt in held]
        request = pb.RenewRequest(worker=self._worker, epoch=self._epoch, bindings=bindings)
        call = stub_for(self._channels, source).Renew(request, timeout=self._patience_s(held, sent_at))
        try:
            reply = await reply_from(source.worker, call)
        except PeerError as error:
            self._judge(source, [attempt for _, attempt in held], error)
            return
        self._refusing.pop(source.epoch, None)
        unknown = {(b.request, b.placement, b.try_number) for b in reply.unknown}
        for key, attempt in held:
            if reply.epoch != source.epoch:
                attempt.lose(TryLoss.DIED, f"{source.worker} has restarted")
            elif (key.request, key.placement, attempt.number) in unknown:
                attempt.lose(TryLoss.REFUSED, f"{source.worker} does not hold the binding any more")
            elif reply.is_stalled:
                attempt.lose(TryLoss.STALLED, f"{source.worker} makes no progress")
            elif attempt.unreachable:
                attempt.lose(TryLoss.UNREACHABLE, f"{source.worker} answers, but {attempt.unreachable}")
            else:
                attempt.renewed_at = sent_at

    def _patience_s(self, held: list[tuple[SequenceKey, Attempt]], now: float) -> float:
        """Return how long to wait for an answer: not much longer than until the first of these is given up."""
        left_s = min(attempt.renewed_at for _, attempt in held) + self._lease_s * GIVE_UP_SHARE - now
        return min(RPC_TIMEOUT_S, max(left_s, self._lease_s / 24))

    def _judge(self, source: WorkerRecord, held: list[Attempt], error: PeerError) -> None:
        """Lose what a holder that has not answered holds, if it is gone, else what was renewed too long ago."""
        now = self._clock()
        is_gone = self._is_gone(source, error, now)
        for attempt in held:
            if is_gone or (attempt.unreachable and is_refusal(error)):
                attempt.lose(TryLoss.DIED, f"nobody is left there: {error}")
            if attempt.renewed_at <= now - self._lease_s * GIVE_UP_SHARE:
                attempt.lose(TryLoss.SILENT, f"the prefill worker does not answer: {error}")

    def _is_gone(self, source: WorkerRecord, error: PeerError, now: float) -> bool:
        """Whether nobody listens at the holder's address, and the registry agrees or it has been so for a while."""
        if not is_refusal(error):
            self._refusing.pop(source.epoch, None)
            return False
        since = self._refusing.setdefault(source.epoch, now)
        return not self._is_listed(source) or now - since >= self._lease_s * REFUSED_SHARE


def is_refusal(error: PeerError) -> bool:
    """Whether nobody listens there as far as gRPC knows: the connection was refused or reset, and so the next one."""
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNAVAILABLE
