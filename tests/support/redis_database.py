"""The database of a Redis server, emptied for one test, and what tests ask of it while others use it."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import TypeVar

from common.broker.backoff import backoff
from common.broker.connection import RedisConnection
from common.errors import BrokerUnavailable
from tests.support.broker_harness import LONG_S
from tests.support.polling import until
from tests.support.redis_server import RedisServer

T = TypeVar("T")


@asynccontextmanager
async def emptied(server: RedisServer) -> AsyncIterator[RedisConnection]:
    """Connect to the server and forget everything it holds."""
    connection = RedisConnection(server.url, command_timeout_s=LONG_S)
    try:
        await connection.call("FLUSHALL")
        yield connection
    finally:
        await connection.close()


async def persistently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat as callers do until Redis answers."""
    for delay_s in islice(backoff(random.random, first_s=0.01, longest_s=0.1), 200):
        try:
            return await attempt()
        except BrokerUnavailable:
            await asyncio.sleep(delay_s)
    raise AssertionError("Redis did not come back")


async def blocked(connection: RedisConnection, num_clients: int = 1) -> None:
    """Return when so many clients wait in blocking reads."""

    async def holds() -> bool:
        return f"blocked_clients:{num_clients}".encode() in await connection.call("INFO", "clients")

    await until(holds, f"{num_clients} blocked clients", LONG_S)
