"""What stands before a gateway's clients: the door that knows their keys, and the limits of those keys."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from common.api_keys.file_store import FileKeyStore
from common.broker.connection import RedisConnection
from common.broker.redis_keys import RedisKeyStore
from common.broker.redis_limits import RedisLimits
from common.settings.serving import ServingSettings
from gateway.api_keys import Door, Keyring, OpenDoor
from gateway.tenant_permits import TenantPermits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entrance:
    """`tenants` None: nobody has limits."""

    door: Door
    tenants: TenantPermits | None


OPEN_ENTRANCE = Entrance(OpenDoor(), None)
"""Of a gateway without keys."""


@contextlib.asynccontextmanager
async def open_entrance(settings: ServingSettings) -> AsyncIterator[Entrance]:
    """Know the keys and keep permits while entered; raises `InvalidSetting` if the file of keys cannot be used."""
    if not settings.has_api_keys:
        yield OPEN_ENTRANCE
        return
    connection = RedisConnection(settings.redis_url or "")  # of its own: refusals wait for no other command
    keyring = Keyring(_store(settings, connection))
    if settings.api_keys_file is not None:
        await keyring.refresh()
    tenants = TenantPermits(RedisLimits(connection))
    tasks = [
        asyncio.create_task(keyring.watch(), name="API keys"),
        asyncio.create_task(tenants.watch(), name="permits"),
    ]
    for task in tasks:
        task.add_done_callback(_tell_of_mistake)
    try:
        yield Entrance(keyring, tenants)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await tenants.close()
        await connection.close()


def _store(settings: ServingSettings, connection: RedisConnection) -> FileKeyStore | RedisKeyStore:
    if settings.api_keys_file is not None:
        return FileKeyStore(settings.api_keys_file)
    return RedisKeyStore(connection)


def _tell_of_mistake(task: "asyncio.Task[None]") -> None:
    """Log why a task has ended that runs until it is cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended by a mistake of ours", task.get_name(), exc_info=error)
