"""What a person wants to know about a cluster, read without taking part in it: workers and lengths of queues."""

import dataclasses
from typing import Final

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.broker.redis_broker import RedisBroker
from common.broker.redis_registry import RedisModelIndex
from common.messages.registry import WorkerState


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    """The live workers of every model; jobs that wait for a worker, and prefill tasks, claimed ones included."""

    workers: tuple[WorkerState, ...]
    num_waiting_jobs: int
    num_prefill_tasks: int


class Observer:
    """Reads `Overview`s; has a connection of its own. Every method may raise `BrokerUnavailable`."""

    def __init__(self, url: str) -> None:
        self._connection: Final = RedisConnection(url)

    async def ping(self) -> None:
        """Return if Redis answers and takes our password."""
        await self._connection.call("PING")

    async def overview(self) -> Overview:
        """Return workers and queue lengths, read one after the other."""
        workers: list[WorkerState] = []
        num_waiting = num_tasks = 0
        for model in await RedisModelIndex(self._connection).models():
            broker = RedisBroker(self._connection, model)
            states = await broker.registry.workers()
            workers += states
            num_waiting += int(await self._connection.call("ZCARD", Keys(model).waiting))
            for fingerprint in sorted({state.record.fingerprint for state in states}):
                num_tasks += await broker.tasks(fingerprint).num_tasks()
        return Overview(tuple(workers), num_waiting, num_tasks)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()
