"""Whether those are still there who have claimed a task and not bound it: a task of a dead claimer is published again
without waiting for the time that a slow one gets."""

from collections.abc import Callable

from common.broker.protocols import TaskQueue
from common.errors import BrokerUnavailable, PeerError
from common.messages.ids import EntryId, Epoch, WorkerId
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.runtime.peers import Peers
from decode_worker.releases import REFUSED_SHARE, is_refusal, stub_for
from proto import worker_pb2 as pb

PROBE_S = 0.25
"""An answer takes 2 ms; who does not answer may live, and is not waited for here."""


class Claimers:
    """Asks for one decode worker (`worker`, `epoch`). `clock` (seconds) stands still while we are paused."""

    def __init__(
        self,
        tasks: TaskQueue,
        peers: Peers,
        channels: Channels,
        worker: WorkerId,
        epoch: Epoch,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tasks = tasks
        self._peers = peers
        self._channels = channels
        self._request = pb.RenewRequest(worker=worker, epoch=epoch)
        self._lease_s = lease_s
        self._clock = clock
        self._refusing: dict[Epoch, float] = {}
        """Where nobody listens, and since when."""

    async def is_gone(self, entry: EntryId) -> bool:
        """Whether somebody has claimed the task and cannot bind it any more: the registry has no such incarnation, or
        nobody has listened at its address for a sixth of a lease.
        """
        try:
            claimer = await self._tasks.claimer(entry)
            if claimer is None:
                return False
            if (record := self._peers.find(*claimer)) is None:  # it may have registered a moment ago
                await self._peers.refresh()
                record = self._peers.find(*claimer)
        except BrokerUnavailable:
            return False
        if record is None:
            return not self._peers.is_in_doubt
        return await self._has_left(record)

    async def _has_left(self, record: WorkerRecord) -> bool:
        now = self._clock()
        self._refusing = {epoch: since for epoch, since in self._refusing.items() if now - since < 2 * self._lease_s}
        try:
            reply = await reply_from(
                record.worker, stub_for(self._channels, record).Renew(self._request, timeout=PROBE_S)
            )
        except PeerError as error:
            if is_refusal(error):
                return now - self._refusing.setdefault(record.epoch, now) >= self._lease_s * REFUSED_SHARE
            self._refusing.pop(record.epoch, None)
            return False
        self._refusing.pop(record.epoch, None)
        return reply.epoch != record.epoch
