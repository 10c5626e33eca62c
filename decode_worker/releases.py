"""Tells prefill workers which bindings are over, and renews the leases of those that are not.

One task per prefill worker would be one connection each; here one sender batches per worker. Losing a release is
harmless: the lease ends.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from common.errors import PeerError
from common.messages.ids import Epoch, TryNumber, WorkerId
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.scheduling.sequence import SequenceKey
from decode_worker.reception import Attempt
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import PrefillStub

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import PrefillAsyncStub

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 1.0

GIVE_UP_SHARE = 0.75
"""Part of a lease without an answer after which we give up. Its holder waits for the whole of it, so we are first."""


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
            await self.flush()

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
    """Renews the bindings of running attempts and loses those whose holder does not answer in time."""

    def __init__(
        self,
        channels: Channels,
        worker: WorkerId,
        epoch: Epoch,
        lease_s: float,
        attempts: Callable[[], Iterable[tuple[SequenceKey, Attempt]]],
    ) -> None:
        self._channels = channels
        self._worker = worker
        self._epoch = epoch
        self._lease_s = lease_s
        self._attempts = attempts

    async def run(self) -> None:
        """Renew until cancelled, six times per lease."""
        while True:
            await asyncio.sleep(self._lease_s / 6)
            await self.renew()

    async def renew(self) -> None:
        """Renew every bound attempt once."""
        by_epoch: dict[Epoch, list[tuple[SequenceKey, Attempt]]] = defaultdict(list)
        for key, attempt in self._attempts():
            if attempt.source is not None:
                by_epoch[attempt.source.epoch].append((key, attempt))
        await asyncio.gather(*(self._renew(held) for held in by_epoch.values()))

    async def _renew(self, held: list[tuple[SequenceKey, Attempt]]) -> None:
        source = held[0][1].source
        assert source is not None
        sent_at = time.monotonic()  # the holder counts from sending, the grantor from receipt: we give up first
        bindings = [binding(key, attempt.number) for key, attempt in held]
        request = pb.RenewRequest(worker=self._worker, epoch=self._epoch, bindings=bindings)
        patience_s = self._patience_s(held, sent_at)
        call = stub_for(self._channels, source).Renew(request, timeout=patience_s)
        try:
            reply = await reply_from(source.worker, call)
        except PeerError:
            self._expire(held, sent_at + patience_s)
            return
        unknown = {(b.request, b.placement, b.try_number) for b in reply.unknown}
        for key, attempt in held:
            if reply.epoch != source.epoch or (key.request, key.placement, attempt.number) in unknown:
                attempt.lose(f"{source.worker} does not hold the binding any more")
            else:
                attempt.renewed_at = sent_at

    def _patience_s(self, held: list[tuple[SequenceKey, Attempt]], now: float) -> float:
        """Return how long to wait for an answer: not much longer than until the first of these is given up."""
        left_s = min(attempt.renewed_at for _, attempt in held) + self._lease_s * GIVE_UP_SHARE - now
        return min(RPC_TIMEOUT_S, max(left_s, self._lease_s / 24))

    def _expire(self, held: list[tuple[SequenceKey, Attempt]], deadline: float) -> None:
        now = time.monotonic()
        oldest = now - self._lease_s * GIVE_UP_SHARE
        was_paused = now - deadline > self._lease_s / 12
        for _, attempt in held:
            if was_paused:  # it is us who did not listen: ask for one interval more
                attempt.renewed_at = max(attempt.renewed_at, oldest + self._lease_s / 6)
            elif attempt.renewed_at <= oldest:
                attempt.lose("the prefill worker does not answer")
