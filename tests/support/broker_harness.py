"""Runs one contract over every broker: in memory with a clock of its own, over Redis and over Valkey."""

from typing import Protocol

from common.broker.connection import RedisConnection
from common.broker.limits import Limits
from common.broker.memory_broker import MemoryBroker, MemoryModelIndex
from common.broker.memory_limits import MemoryLimits
from common.broker.memory_notices import MemoryNoticeBoard
from common.broker.policy import BrokerPolicy
from common.broker.protocols import JobQueue, ModelIndex, NoticeBoard, PrefixIndex, Registry, TaskQueue
from common.broker.redis_broker import RedisBroker
from common.broker.redis_limits import RedisLimits
from common.broker.redis_notices import RedisNoticeBoard
from common.messages.ids import Fingerprint, ModelName
from tests.support.broker_records import MODEL

BRIEF = BrokerPolicy(worker_ttl_s=0.5, gateway_ttl_s=0.4, model_ttl_s=0.5)
LONG_S = 20.0
"""Blocking reads of tests are woken, never timed out, and a slow command is no failure of the broker."""


class CountedTasks(TaskQueue, Protocol):
    """Tasks that can be counted, as `tandem status` does."""

    async def num_tasks(self) -> int:
        """Return how many tasks stand in the stream, claimed ones included."""


class Broker(Protocol):
    """What both implementations offer."""

    @property
    def registry(self) -> Registry:
        """Who is there."""

    @property
    def jobs(self) -> JobQueue:
        """Jobs for decode workers."""

    @property
    def prefixes(self) -> PrefixIndex:
        """What workers have in their caches."""

    @property
    def index(self) -> ModelIndex:
        """Models of the cluster."""

    def tasks(self, fingerprint: Fingerprint) -> CountedTasks:
        """Prefill tasks."""


class Harness(Protocol):
    """Makes brokers and lets time pass."""

    def broker(self, model: ModelName = MODEL, policy: BrokerPolicy | None = None) -> Broker:
        """Return a broker of a model; brokers of one model meet each other only if it is the same object."""

    def notices(self, policy: BrokerPolicy | None = None) -> NoticeBoard:
        """Return a notice board that nobody else has."""

    def limits(self, policy: BrokerPolicy | None = None) -> Limits:
        """Return the limits as one gateway sees them; those of one test count together."""

    async def elapse(self, seconds: float) -> None:
        """Return when the broker's clock has advanced so much."""


class MemoryHarness:
    """Brokers in memory."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        self._index: MemoryModelIndex | None = None
        self._limits: MemoryLimits | None = None

    def broker(self, model: ModelName = MODEL, policy: BrokerPolicy | None = None) -> Broker:
        """Return a broker whose index is shared with the other ones of the test."""
        self._index = self._index or MemoryModelIndex(self._clock, policy)
        return MemoryBroker(model, self._clock, policy, self._index)

    def notices(self, policy: BrokerPolicy | None = None) -> NoticeBoard:
        """Return a new board."""
        return MemoryNoticeBoard(self._clock, policy)

    def limits(self, policy: BrokerPolicy | None = None) -> Limits:
        """Return the only ones of the test; the policy of the first call holds."""
        self._limits = self._limits or MemoryLimits(self._clock, policy)
        return self._limits

    async def elapse(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_s += seconds

    def _clock(self) -> float:
        return self._now_s


class RedisHarness:
    """Brokers on one connection."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    def broker(self, model: ModelName = MODEL, policy: BrokerPolicy | None = None) -> Broker:
        """Return a broker on the shared connection."""
        return RedisBroker(self._connection, model, policy)

    def notices(self, policy: BrokerPolicy | None = None) -> NoticeBoard:
        """Return the board of this Redis, which the test has for itself."""
        return RedisNoticeBoard(self._connection, policy)

    def limits(self, policy: BrokerPolicy | None = None) -> Limits:
        """Return new ones over this Redis."""
        return RedisLimits(self._connection, policy)

    async def elapse(self, seconds: float) -> None:
        """Let Redis itself count the time, by reading a stream that nobody writes."""
        await self._connection.read(seconds + 0.02, "XREAD", streams=("nobody-writes-here", "0-0"))
