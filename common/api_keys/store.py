"""The seam of what a cluster knows of its API keys: in a file of one host, or in Redis for all hosts."""

from typing import Protocol

from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, KeyListing


class KeyStore(Protocol):
    """Every method raises `BrokerUnavailable` if Redis does not answer, `InvalidSetting` if the file cannot be used."""

    async def read(self, known: str | None = None) -> KeyListing | None:
        """Return all keys; None if they are still those of version `known`."""

    async def put(self, key: ApiKey) -> None:
        """Add a key, or replace the one with its id."""

    async def replace(self, key: ApiKey) -> bool:
        """Replace the key with its id; False if there is none: it may have been removed just now."""

    async def remove(self, tenant: TenantId) -> bool:
        """Forget a key; return whether there was one."""

    async def close(self) -> None:
        """Close what was opened."""
