"""The brokers that the broker suite runs over: in memory, over Redis and over Valkey."""

from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext

import pytest

from tests.support.broker_harness import Broker, Harness, MemoryHarness, RedisHarness
from tests.support.redis_database import emptied
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        pytest.param("redis-server", marks=pytest.mark.redis),
        pytest.param("valkey-server", marks=pytest.mark.redis),
    ],
)
def broker_server(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    """The server behind the broker; None for the broker in memory."""
    with nullcontext() if request.param == "memory" else running_redis(request.param) as running:
        yield running


@pytest.fixture
async def harness(broker_server: RedisServer | None) -> AsyncIterator[Harness]:
    """Makes brokers over an empty state."""
    if broker_server is None:
        yield MemoryHarness()
        return
    async with emptied(broker_server) as connection:
        yield RedisHarness(connection)


@pytest.fixture
def broker(harness: Harness) -> Broker:
    """A broker with the default policy."""
    return harness.broker()
