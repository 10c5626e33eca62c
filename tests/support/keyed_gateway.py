"""A gateway whose clients must show keys, with limits that count in memory or in a Redis."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, new_key
from common.broker.limits import Limits
from common.messages.ids import ModelName, TenantId
from common.messages.tenant import NO_LIMITS, ApiKey, TenantLimits
from gateway.api_keys import Keyring
from gateway.entrance import Entrance
from gateway.tenant_permits import TenantPermits
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.scripted_engine import ScriptedEngine


class KeyCabinet:
    """Makes keys in a file."""

    def __init__(self, folder: Path) -> None:
        self.store = FileKeyStore(folder / "keys.json")

    async def issue(
        self,
        tenant: str,
        limits: TenantLimits = NO_LIMITS,
        *,
        max_priority: int = 0,
        models: tuple[str, ...] | None = None,
    ) -> str:
        """Return a new key of that id."""
        key = new_key()
        names = None if models is None else tuple(map(ModelName, models))
        record = ApiKey(TenantId(tenant), tenant, digest_of(key), int(time.time()), limits, max_priority, names)
        await self.store.put(record)
        return key

    def entrance(self, limits: Limits) -> Entrance:
        """Return a door for these keys."""
        return Entrance(Keyring(self.store), TenantPermits(limits))


def bearer(key: str) -> dict[str, str]:
    """Return the header of a key."""
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def running_keyed_gateway(engine: ScriptedEngine, entrance: Entrance, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway behind this entrance."""
    async with running_gateway(engine, entrance, **settings) as running:
        yield running
    if entrance.tenants is not None:
        await entrance.tenants.close()
