"""The seams of the broker. Each has a Redis implementation and an in-memory twin under one contract suite.

Every method raises `BrokerUnavailable` when Redis cannot be reached in time, and nothing else of redis-py's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from common.messages.ids import EntryId, Epoch, GatewayId, ModelName, PlacementNumber, RequestId, TenantId, WorkerId
from common.messages.job import Job, PrefillTask
from common.messages.notice import CancelNotice
from common.messages.prefixes import NO_PREFIXES, PromptPrefixes
from common.messages.registry import ModelCard, WorkerLoad, WorkerRecord, WorkerState

NO_CORRECTIONS: Final[Mapping[TenantId, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Placed:
    """The job stands in this worker's stream."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Waiting:
    """No worker has room; the job waits for one. `num_ahead` jobs stand before it."""

    num_ahead: int


class Whereabouts:
    """Where a placement is, as far as Redis knows (constants)."""

    WAITING: Final = "waiting"
    PLACED: Final = "placed"
    """In some worker's stream, not yet absorbed."""
    UNKNOWN: Final = "unknown"
    """Absorbed by a worker, or lost."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decode worker that a gateway proposes. `cost` is what the gateway knows against it (tokens)."""

    worker: WorkerId
    epoch: Epoch
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class QueuePressure:
    """What waits for room, and how fast that goes to workers: tokens per second, None while nobody knows."""

    num_requests: int = 0
    num_tokens: int = 0
    tokens_per_s: float | None = None

    @property
    def wait_s(self) -> float | None:
        """Time until all that waits now has gone to workers."""
        return self.num_tokens / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """Short names of prefixes that came into a worker's cache or left it. `num_known`: how many the worker believes to
    be told at present."""

    num_known: int
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job read from a worker's stream."""

    entry: EntryId
    job: Job


@dataclass(frozen=True, slots=True)
class Delivery:
    """A prefill task claimed from the stream."""

    entry: EntryId
    task: PrefillTask


@dataclass(frozen=True, slots=True)
class PostedNotice:
    """A notice and its place on the board."""

    entry: EntryId
    notice: CancelNotice


class Registry(Protocol):
    """Who is there. A worker is alive for others while its last beat is younger than the TTL."""

    async def beat(self, record: WorkerRecord, load: WorkerLoad) -> None:
        """Register or renew a worker; a decode worker's beat also drops its absorbed jobs from its stream and moves
        waiting jobs that now fit into it."""

    async def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Remove a worker; nothing happens if its seat is taken by another epoch."""

    async def workers(self) -> list[WorkerState]:
        """Return the live workers of the model."""

    async def publish_card(self, card: ModelCard) -> None:
        """Make the model known to gateways."""

    async def card(self) -> ModelCard | None:
        """Return the model's card, or None if no worker has published one."""


class JobQueue(Protocol):
    """Jobs on their way from gateways to decode workers."""

    async def place(
        self, job: Job, num_blocks: int, candidates: Sequence[Candidate], prefixes: PromptPrefixes = NO_PREFIXES
    ) -> Placed | Waiting:
        """Append the job to the stream of the cheapest candidate with room for `num_blocks` and all its choices; else
        let it wait, for at most its `time_left_s`. A worker that has some of the `prefixes` is cheaper.

        Waiting jobs go by priority (which grows while they wait), by what their tenants were served, by age. Nobody
        overtakes a waiting job that precedes it, on a worker that could hold that job.

        Idempotent by (request, placement). A higher placement of a request removes its older ones, keeps its age and
        costs its tenant nothing more. Raise `Overloaded` if too many wait or if the job could not be served in time,
        `StalePlacement` if the placement was withdrawn or a higher one was placed.
        """

    async def withdraw(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remove the placement and older ones of that request from the waiting set and from every stream; a `place` of
        them that arrives later is refused."""

    async def whereabouts(self, request: RequestId, placement: PlacementNumber) -> str:
        """Return one of the `Whereabouts` constants."""

    async def read(self, worker: WorkerId, epoch: Epoch, after: EntryId | None, block_s: float) -> list[QueuedJob]:
        """Return jobs addressed to that incarnation behind `after`, waiting up to `block_s` for the first one."""

    async def beat_gateway(
        self, gateway: GatewayId, corrections: Mapping[TenantId, int] = NO_CORRECTIONS
    ) -> QueuePressure:
        """Renew the lease of a gateway; its waiting jobs vanish when it ends. `corrections` are the tokens by which
        tenants were charged too little (or, negative, too much) for what has ended since the last beat."""


class PrefixIndex(Protocol):
    """What the prefix caches of decode workers have, for `JobQueue.place`. An entry that is wrong costs time, nothing
    else."""

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Take in what has changed. False: other entries were known than the worker believed; all are forgotten, and it
        begins anew."""

    async def depths(self, workers: Sequence[tuple[WorkerId, Epoch]], prefixes: PromptPrefixes) -> list[int]:
        """Return how many of a prompt's prefixes each worker has, by the longest one."""


class TaskQueue(Protocol):
    """Prefill tasks, pulled by prefill workers through a consumer group of their fingerprint."""

    async def publish(self, task: PrefillTask, replaces: EntryId | None = None) -> EntryId:
        """Append a task; delete the older try it replaces in the same step."""

    async def claim(self, worker: WorkerId, epoch: Epoch, block_s: float) -> Delivery | None:
        """Take the oldest unclaimed task, waiting up to `block_s`."""

    async def claimer(self, entry: EntryId) -> tuple[WorkerId, Epoch] | None:
        """Return who has claimed a task that is still there, or None if nobody has."""

    async def delete(self, entry: EntryId) -> None:
        """Acknowledge and delete a task in one step: only its author does this, or a claimer whose author is gone."""

    async def abandoned(self, worker: WorkerId, epoch: Epoch, min_idle_s: float) -> list[Delivery]:
        """Take over tasks that were claimed by anybody longer ago than `min_idle_s`."""


class NoticeBoard(Protocol):
    """What gateways tell all gateways of the cluster. Every one reads for itself what is posted after it began; old
    notices go when there are many."""

    async def post(self, notice: CancelNotice) -> None:
        """Tell all gateways."""

    async def newest(self) -> EntryId:
        """Return the entry behind which a reader begins that wants only what comes from now on."""

    async def read(self, after: EntryId, block_s: float) -> list[PostedNotice]:
        """Return notices behind `after`, waiting up to `block_s` for the first one."""


class ModelIndex(Protocol):
    """Which models the cluster has, so that a gateway needs to know no names."""

    async def models(self) -> list[ModelName]:
        """Return the models that had a worker lately, in alphabetical order."""
