"""API keys in Redis, for gateways on many hosts. They stay as long as Redis keeps its data."""

import logging
import secrets
from typing import Final

from common.broker import scripts
from common.broker.connection import RedisConnection
from common.broker.keys import API_KEYS
from common.errors import MalformedRecord
from common.messages.codec import decode, encode
from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, KeyListing

logger = logging.getLogger(__name__)

NO_VERSION = "-"
"""No version is called so."""

ANY, KNOWN = "any", "known"
"""Which ids are written."""


class RedisKeyStore:
    """The keys of one cluster. Whoever made the connection closes it, unless `owns_connection`."""

    def __init__(self, connection: RedisConnection, *, owns_connection: bool = False) -> None:
        self._connection: Final = connection
        self._owns_connection: Final = owns_connection

    async def read(self, known: str | None = None) -> KeyListing | None:
        """Return all keys; None if they are still those of version `known`."""
        version, *rest = await self._connection.run(scripts.READ_KEYS, API_KEYS, NO_VERSION if known is None else known)
        if not rest:
            return None
        keys = []
        for record in rest[0]:
            try:
                keys.append(decode(record, ApiKey))
            except MalformedRecord as error:
                logger.warning("API key of another version left out: %s", error)
        return KeyListing(version.decode(), tuple(sorted(keys, key=lambda key: (key.created, key.id))))

    async def put(self, key: ApiKey) -> None:
        """Add a key, or replace the one with its id."""
        await self._connection.run(scripts.WRITE_KEY, API_KEYS, secrets.token_hex(8), key.id, ANY, encode(key))

    async def replace(self, key: ApiKey) -> bool:
        """Replace the key with its id; False if there is none."""
        version = secrets.token_hex(8)
        return bool(await self._connection.run(scripts.WRITE_KEY, API_KEYS, version, key.id, KNOWN, encode(key)))

    async def remove(self, tenant: TenantId) -> bool:
        """Forget a key; return whether there was one."""
        return bool(await self._connection.run(scripts.WRITE_KEY, API_KEYS, secrets.token_hex(8), tenant, KNOWN))

    async def close(self) -> None:
        """Close the connection, if it is ours."""
        if self._owns_connection:
            await self._connection.close()
