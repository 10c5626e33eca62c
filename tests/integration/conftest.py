"""Event loops of integration tests: asyncio's own, unless a module names others in `LOOP_FACTORIES`; and a Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest

from common.broker.connection import RedisConnection
from common.broker.redis_broker import RedisBroker
from tests.support.broker_records import MODEL
from tests.support.redis_database import emptied
from tests.support.redis_server import RedisServer, running_redis


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    module = item.getparent(pytest.Module)
    assert module is not None
    factories: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = getattr(
        module.obj, "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop}
    )
    return factories


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """A Redis or Valkey of the module's own."""
    with running_redis() as running:
        yield running


@pytest.fixture
async def connection(redis_server: RedisServer) -> AsyncIterator[RedisConnection]:
    """A connection to that Redis, which holds nothing."""
    async with emptied(redis_server) as connection:
        yield connection


@pytest.fixture
def broker(connection: RedisConnection) -> RedisBroker:
    """A broker over that Redis, with the default policy."""
    return RedisBroker(connection, MODEL)
