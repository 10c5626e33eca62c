"""The broker over Redis: the three seams of one model on one set of connections."""

from types import TracebackType
from typing import Final, Self

from common.broker.connection import COMMAND_TIMEOUT_S, RedisConnection
from common.broker.policy import BrokerPolicy
from common.broker.redis_jobs import RedisJobQueue
from common.broker.redis_prefixes import RedisPrefixIndex
from common.broker.redis_registry import RedisModelIndex, RedisRegistry
from common.broker.redis_tasks import RedisTaskQueue
from common.messages.ids import Fingerprint, ModelName


class RedisBroker:
    """Registry, jobs and prefill tasks of one model. Whoever made the connection closes it."""

    def __init__(self, connection: RedisConnection, model: ModelName, policy: BrokerPolicy | None = None) -> None:
        self._connection: Final = connection
        self._model: Final = model
        self._policy: Final = policy or BrokerPolicy()
        self.registry: Final = RedisRegistry(connection, model, self._policy)
        self.jobs: Final = RedisJobQueue(connection, model, self._policy)
        self.prefixes: Final = RedisPrefixIndex(connection, model, self._policy)

    @classmethod
    def connect(
        cls,
        url: str,
        model: ModelName,
        policy: BrokerPolicy | None = None,
        *,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> Self:
        """Return a broker with connections of its own, opened when first used. A bad URL raises `InvalidSetting`.

        A gateway with several models shares one `RedisConnection` among its brokers and its index instead.
        """
        return cls(RedisConnection(url, command_timeout_s=command_timeout_s), model, policy)

    @property
    def index(self) -> RedisModelIndex:
        """Which models there are, this one or others."""
        return RedisModelIndex(self._connection, self._policy)

    def tasks(self, fingerprint: Fingerprint) -> RedisTaskQueue:
        """Return the prefill tasks of one fingerprint."""
        return RedisTaskQueue(self._connection, self._model, fingerprint, self._policy)

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        """Nothing to do yet: connections open when first used."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()
