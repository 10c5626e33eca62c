"""The broker in memory: the same answers as Redis gives, for one process and its tests."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from common.broker.memory_queue import MemoryQueue
from common.broker.memory_stream import Bell
from common.broker.memory_tasks import MemoryTaskQueue
from common.broker.policy import BrokerPolicy
from common.broker.protocols import NO_CORRECTIONS, Candidate, Placed, QueuedJob, QueuePressure, Waiting
from common.messages.ids import (
    EntryId,
    Epoch,
    Fingerprint,
    GatewayId,
    ModelName,
    PlacementNumber,
    RequestId,
    TenantId,
    WorkerId,
)
from common.messages.job import Job
from common.messages.prefixes import NO_PREFIXES, PromptPrefixes
from common.messages.registry import ModelCard, WorkerLoad, WorkerRecord, WorkerState

logger = logging.getLogger(__name__)


class MemoryModelIndex:
    """Which models there are; shared by the brokers of several models."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, policy: BrokerPolicy | None = None) -> None:
        self._clock: Final = clock
        self._policy: Final = policy or BrokerPolicy()
        self._last_beats_s: dict[ModelName, float] = {}

    def announce(self, model: ModelName) -> None:
        """Note that a model has a worker."""
        self._last_beats_s[model] = self._clock()

    async def models(self) -> list[ModelName]:
        """Return the models that had a worker lately, in alphabetical order."""
        oldest_s = self._clock() - self._policy.model_ttl_s
        return sorted(model for model, beat_s in self._last_beats_s.items() if beat_s > oldest_s)


class MemoryRegistry:
    """Workers and card of one model."""

    def __init__(self, model: ModelName, queue: MemoryQueue, bell: Bell, index: MemoryModelIndex) -> None:
        self._model: Final = model
        self._queue: Final = queue
        self._bell: Final = bell
        self._index: Final = index
        self._card: ModelCard | None = None

    async def beat(self, record: WorkerRecord, load: WorkerLoad) -> None:
        """Register or renew a worker and move waiting jobs to it; a beat of an epoch that lost its seat is ignored."""
        if not self._queue.beat(record, load):
            logger.error("beat ignored: another process has the seat", extra={"worker": record.worker})
            return
        self._index.announce(self._model)
        self._bell.ring()

    async def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Remove a worker and the jobs it has not read, unless its seat is taken by another epoch."""
        self._queue.leave(worker, epoch)

    async def workers(self) -> list[WorkerState]:
        """Return the live workers of the model."""
        return self._queue.workers()

    async def publish_card(self, card: ModelCard) -> None:
        """Make the model known to gateways."""
        self._card = card

    async def card(self) -> ModelCard | None:
        """Return the model's card, or None if no worker has published one."""
        return self._card


class MemoryJobQueue:
    """Jobs of one model on their way from gateways to decode workers."""

    def __init__(self, queue: MemoryQueue, bell: Bell) -> None:
        self._queue: Final = queue
        self._bell: Final = bell

    async def place(
        self, job: Job, num_blocks: int, candidates: Sequence[Candidate], prefixes: PromptPrefixes = NO_PREFIXES
    ) -> Placed | Waiting:
        """Append the job to the stream of the cheapest candidate with room, else let it wait; see `JobQueue.place`.

        Raise `Overloaded` if it must not wait, `StalePlacement` if the placement was withdrawn or superseded.
        """
        placed = self._queue.place(job, num_blocks, candidates, prefixes)
        self._bell.ring()
        return placed

    async def withdraw(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remove the placement and older ones of that request; a place of them that arrives later is refused."""
        self._queue.withdraw(request, placement)
        self._bell.ring()

    async def whereabouts(self, request: RequestId, placement: PlacementNumber) -> str:
        """Return one of the `Whereabouts` constants."""
        return self._queue.whereabouts(request, placement)

    async def read(self, worker: WorkerId, epoch: Epoch, after: EntryId | None, block_s: float) -> list[QueuedJob]:
        """Return jobs addressed to that incarnation behind `after`, waiting up to `block_s` for the first one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + block_s
        while True:
            jobs = self._queue.jobs_behind(worker, epoch, after)
            left_s = deadline_s - loop.time()
            if jobs or left_s <= 0:
                return [QueuedJob(entry, job) for entry, job in jobs]
            await self._bell.wait(left_s)  # rings for every worker's stream

    async def beat_gateway(
        self, gateway: GatewayId, corrections: Mapping[TenantId, int] = NO_CORRECTIONS
    ) -> QueuePressure:
        """Renew the lease of a gateway and correct what its tenants were charged."""
        return self._queue.beat_gateway(gateway, corrections)


class MemoryBroker:
    """Registry, jobs and prefill tasks of one model; all parts of a test share one. `clock` is in seconds."""

    def __init__(
        self,
        model: ModelName,
        clock: Callable[[], float] = time.monotonic,
        policy: BrokerPolicy | None = None,
        index: MemoryModelIndex | None = None,
    ) -> None:
        self._clock: Final = clock
        self._policy: Final = policy or BrokerPolicy()
        self._tasks: dict[Fingerprint, MemoryTaskQueue] = {}
        self.index: Final = index or MemoryModelIndex(clock, self._policy)
        queue, bell = MemoryQueue(clock, self._policy), Bell()
        self.registry: Final = MemoryRegistry(model, queue, bell, self.index)
        self.jobs: Final = MemoryJobQueue(queue, bell)
        self.prefixes: Final = queue.prefixes

    def tasks(self, fingerprint: Fingerprint) -> MemoryTaskQueue:
        """Return the prefill tasks of one fingerprint."""
        if fingerprint not in self._tasks:
            self._tasks[fingerprint] = MemoryTaskQueue(self._clock, self._policy)
        return self._tasks[fingerprint]

    async def close(self) -> None:
        """Nothing to release."""
