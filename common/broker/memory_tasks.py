"""Prefill tasks in memory."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.broker.memory_stream import Bell, MemoryStream
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Delivery
from common.messages.ids import EntryId, Epoch, WorkerId
from common.messages.job import PrefillTask


@dataclass(slots=True)
class _Claim:
    claimer: tuple[WorkerId, Epoch]
    since_s: float
    num_deliveries: int


class MemoryTaskQueue:
    """Prefill tasks of one fingerprint."""

    def __init__(self, clock: Callable[[], float], policy: BrokerPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._stream: MemoryStream[PrefillTask] = MemoryStream()
        self._claims: dict[EntryId, _Claim] = {}
        self._published_s = 0.0
        self._bell = Bell()

    async def publish(self, task: PrefillTask, replaces: EntryId | None = None) -> EntryId:
        """Append a task; delete the older try it replaces in the same step."""
        self._expire()
        if replaces is not None:
            self._remove(replaces)
        self._published_s = self._clock()
        entry = self._stream.append(task, self._published_s)
        self._bell.ring()
        return entry

    async def claim(self, worker: WorkerId, epoch: Epoch, block_s: float) -> Delivery | None:
        """Take the oldest unclaimed task, waiting up to `block_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + block_s
        while True:
            delivery = self._take_oldest((worker, epoch))
            left_s = deadline_s - loop.time()
            if delivery is not None or left_s <= 0:
                return delivery
            await self._bell.wait(left_s)  # rings for all who wait; one of them finds the task

    async def claimer(self, entry: EntryId) -> tuple[WorkerId, Epoch] | None:
        """Return who has claimed a task that is still there, or None if nobody has."""
        self._expire()
        claim = self._claims.get(entry)
        return None if claim is None else claim.claimer

    async def delete(self, entry: EntryId) -> None:
        """Acknowledge and delete a task; nothing happens if it is gone."""
        self._remove(entry)

    async def abandoned(self, worker: WorkerId, epoch: Epoch, min_idle_s: float) -> list[Delivery]:
        """Take over tasks that were claimed by anybody longer ago than `min_idle_s`."""
        self._expire()
        now_s = self._clock()
        deliveries = []
        for entry, claim in list(self._claims.items()):
            task = self._stream.get(entry)
            if task is None or now_s - claim.since_s < min_idle_s:
                continue
            if claim.num_deliveries >= self._policy.max_deliveries:
                self._remove(entry)
                continue
            self._claims[entry] = _Claim((worker, epoch), now_s, claim.num_deliveries + 1)
            deliveries.append(Delivery(entry, task))
        return deliveries

    async def num_tasks(self) -> int:
        """Return how many tasks stand in the stream, claimed ones included."""
        self._expire()
        return len(self._stream)

    def _take_oldest(self, claimer: tuple[WorkerId, Epoch]) -> Delivery | None:
        self._expire()
        for entry in self._stream:
            task = self._stream.get(entry)
            if task is not None and entry not in self._claims:
                self._claims[entry] = _Claim(claimer, self._clock(), 1)
                return Delivery(entry, task)
        return None

    def _remove(self, entry: EntryId) -> None:
        self._stream.delete(entry)
        self._claims.pop(entry, None)

    def _expire(self) -> None:
        if self._clock() - self._published_s > self._policy.task_ttl_s:
            for entry in self._stream:
                self._remove(entry)
