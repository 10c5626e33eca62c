"""`tandem keys`: add, list, rotate and revoke the API keys that clients of a cluster show."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, new_key
from common.api_keys.store import KeyStore
from common.broker.connection import RedisConnection
from common.broker.redis_keys import RedisKeyStore
from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, TenantLimits
from common.settings.parse import parse, parse_named
from tandem.cluster.state import StateDir
from tandem.console import complain, notes, say, table_console
from tandem.invocation import invocation
from tandem.key_settings import AddSettings, KeySettings, ListSettings, RevokeSettings, RotateSettings

COLUMNS = ("id", "name", "requests/min", "tokens/min", "at once", "priority", "weight", "models", "created", "expires")
USAGE = """usage: tandem keys add --name NAME [FLAGS]   print a new key, once
       tandem keys list [FLAGS]              show the keys, each without itself
       tandem keys rotate ID [FLAGS]         print a key that takes the place of an old one
       tandem keys revoke ID ... [FLAGS]     forget keys; gateways let nobody in with them 2 s later

Each takes --help. Where the keys are: --api-keys-file FILE, or --api-keys redis."""


def run(argv: Sequence[str]) -> int:
    """Run one of the subcommands; non-zero if a key that was named is not there."""
    match list(argv):
        case ["add", *flags]:
            add = parse(AddSettings, flags, os.environ, "tandem keys add")
            return _with_store(add, lambda store: _add(store, add))
        case ["list", *flags]:
            shown = parse(ListSettings, flags, os.environ, "tandem keys list")
            return _with_store(shown, lambda store: _list(store, is_json=shown.json))
        case ["rotate", *flags]:
            rotate, names = parse_named(RotateSettings, flags, os.environ, "tandem keys rotate", "ID")
            return _with_store(rotate, lambda store: _rotate(store, _only(names)))
        case ["revoke", *flags]:
            revoke, names = parse_named(RevokeSettings, flags, os.environ, "tandem keys revoke", "ID")
            return _with_store(revoke, lambda store: _revoke(store, _some(names)))
        case [] | ["-h" | "--help", *_]:
            say(USAGE)
            return EXIT_OK
        case [other, *_]:
            raise StartupError(
                f"keys has no command {other!r}; there are add, list, rotate, revoke (see {invocation()} keys --help)"
            )
        case _:
            raise AssertionError(argv)


async def _add(store: KeyStore, settings: AddSettings) -> int:
    key = new_key()
    record = ApiKey(
        id=TenantId(f"key-{secrets.token_hex(4)}"),
        name=settings.name,
        digest=digest_of(key),
        created=int(time.time()),
        limits=TenantLimits(settings.requests_per_minute, settings.tokens_per_minute, settings.max_concurrent),
        max_priority=settings.max_priority,
        models=settings.models or None,
        weight=settings.weight,
        expires=settings.expires,
    )
    await store.put(record)
    _show_once(key, record)
    return EXIT_OK


async def _list(store: KeyStore, *, is_json: bool) -> int:
    keys = await _keys(store)
    if is_json:
        shown = [{name: getattr(key, name) for name in ApiKey.__struct_fields__ if name != "digest"} for key in keys]
        say(msgspec.json.encode({"keys": shown}).decode())
        return EXIT_OK
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column)
    for key in keys:
        table.add_row(*map(escape, _row(key)))
    table_console().print(table)
    return EXIT_OK


async def _rotate(store: KeyStore, tenant: TenantId) -> int:
    key = new_key()
    for found in await _keys(store):
        record = msgspec.structs.replace(found, digest=digest_of(key))
        if found.id == tenant and await store.replace(record):  # else it was revoked meanwhile, and stays so
            _show_once(key, record)
            return EXIT_OK
    complain(f"there is no key {tenant}")
    return EXIT_FAILURE


async def _revoke(store: KeyStore, tenants: Sequence[TenantId]) -> int:
    code = EXIT_OK
    for tenant in tenants:
        if await store.remove(tenant):
            say(f"revoked {tenant}")
        else:
            complain(f"there is no key {tenant}")
            code = EXIT_FAILURE
    return code


def _with_store(settings: KeySettings, work: Callable[[KeyStore], Coroutine[Any, Any, int]]) -> int:
    async def use() -> int:
        async with _open_store(settings) as store:
            return await work(store)

    return asyncio.run(use())


@asynccontextmanager
async def _open_store(settings: KeySettings) -> AsyncIterator[KeyStore]:
    if settings.api_keys_file is not None:
        yield FileKeyStore(settings.api_keys_file)
        return
    connection = RedisConnection(settings.redis_url or _redis_of_cluster(settings))
    try:
        yield RedisKeyStore(connection)
    finally:
        await connection.close()


def _redis_of_cluster(settings: KeySettings) -> str:
    """Return the Redis of the cluster that runs here."""
    state_dir = StateDir(settings.state_dir)
    state = state_dir.read_running()
    if state is None:
        raise StartupError(f"no cluster runs in {state_dir.path}: give --redis-url")
    return state.redis_url


async def _keys(store: KeyStore) -> Sequence[ApiKey]:
    listing = await store.read()
    assert listing is not None  # no version was known
    return listing.keys


def _show_once(key: str, record: ApiKey) -> None:
    say(key)
    notes.print(f"{record.id} ({record.name}); the key is shown this once", markup=False)


def _row(key: ApiKey) -> tuple[str, ...]:
    limits = key.limits
    bounds = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
    return (
        key.id,
        key.name,
        *("-" if bound is None else str(bound) for bound in bounds),
        str(key.max_priority),
        f"{key.weight:g}",
        "all" if key.models is None else ",".join(key.models),
        _day(key.created),
        "never" if key.expires is None else _day(key.expires),
    )


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _some(names: Sequence[str]) -> Sequence[TenantId]:
    if not names:
        raise StartupError("name the id of a key (see tandem keys list)")
    return [TenantId(name) for name in names]


def _only(names: Sequence[str]) -> TenantId:
    if len(names) != 1:
        raise StartupError("name the id of one key (see tandem keys list)")
    return TenantId(names[0])
