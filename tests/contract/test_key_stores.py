"""What every store of API keys promises, in a file and in Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from common.api_keys.file_store import FileKeyStore
from common.api_keys.store import KeyStore
from common.broker.redis_keys import RedisKeyStore
from common.messages.ids import ModelName, TenantId
from common.messages.tenant import ApiKey, TenantLimits
from tests.support.redis_database import emptied
from tests.support.redis_server import RedisServer, running_redis

ALICE = ApiKey(
    TenantId("key-a"),
    "alice",
    "a" * 64,
    1,
    TenantLimits(3, 4, 5),
    2,
    (ModelName("m"), ModelName("n")),
    2.5,
    1_900_000_000,
)
BOB = ApiKey(TenantId("key-b"), "Bøb", "b" * 64, 2)


@pytest.fixture(scope="module", params=["file", pytest.param("redis", marks=pytest.mark.redis)])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    """The Redis behind the store; None for a file."""
    with nullcontext() if request.param == "file" else running_redis() as running:
        yield running


@pytest.fixture
async def store(server: RedisServer | None, tmp_path: Path) -> AsyncIterator[KeyStore]:
    """An empty store."""
    if server is None:
        file = tmp_path / "keys.json"
        file.touch(0o600)
        file.write_text('{"keys": []}')
        yield FileKeyStore(file)
        return
    async with emptied(server) as connection:
        yield RedisKeyStore(connection)


async def keys_in(store: KeyStore) -> list[ApiKey]:
    """Return all keys."""
    listing = await store.read()
    assert listing is not None
    return sorted(listing.keys, key=lambda key: key.id)


async def version_of(store: KeyStore) -> str:
    """Return the version now."""
    listing = await store.read()
    assert listing is not None
    return listing.version


async def test_keys_are_kept_whole(store: KeyStore) -> None:
    assert await keys_in(store) == []
    await store.put(BOB)
    await store.put(ALICE)
    assert await keys_in(store) == [ALICE, BOB]


async def test_a_key_is_replaced_by_its_id(store: KeyStore) -> None:
    await store.put(BOB)
    rotated = msgspec.structs.replace(BOB, digest="c" * 64)
    await store.put(rotated)
    assert await keys_in(store) == [rotated]


async def test_a_removed_key_is_gone_and_no_other(store: KeyStore) -> None:
    await store.put(ALICE)
    await store.put(BOB)
    assert await store.remove(ALICE.id)
    assert not await store.remove(ALICE.id)
    assert await keys_in(store) == [BOB]


async def test_a_key_that_was_removed_meanwhile_is_not_replaced(store: KeyStore) -> None:
    await store.put(ALICE)
    await store.put(BOB)
    rotated = msgspec.structs.replace(BOB, digest="c" * 64)
    assert await store.replace(rotated)
    assert await keys_in(store) == [ALICE, rotated]
    await store.remove(BOB.id)
    version = await version_of(store)
    assert not await store.replace(rotated)
    assert await keys_in(store) == [ALICE]
    assert await store.read(version) is None


async def test_every_write_is_noticed_and_nothing_else(store: KeyStore) -> None:
    version = await version_of(store)
    assert await store.read(version) is None
    await store.put(ALICE)
    assert await store.read(version) is not None
    version = await version_of(store)
    await store.put(msgspec.structs.replace(ALICE, digest="c" * 64))
    assert await store.read(version) is not None
    version = await version_of(store)
    await store.remove(ALICE.id)
    assert await store.read(version) is not None


async def test_writers_do_not_lose_each_others_keys(store: KeyStore) -> None:
    many = [ApiKey(TenantId(f"key-{number:02}"), "", f"{number:064}", number) for number in range(20)]
    await asyncio.gather(*map(store.put, many))
    assert await keys_in(store) == many
