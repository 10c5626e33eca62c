"""At the door of a gateway: from the `Authorization` that a client sends to who it is.

A gateway with keys knows them all, and reads them again twice a second if they have changed: a key that was revoked
works for `MAX_AGE_S` at most. If they cannot be read for so long, nobody is let in (503), for the key in question may
be revoked.
"""

import asyncio
import hmac
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from common.api_keys.secret import digest_of, is_well_formed
from common.api_keys.store import KeyStore
from common.errors import AuthenticationFailed, InvalidSetting, Unavailable
from common.messages.tenant import ApiKey, KeyListing
from gateway.callers import ANYONE, Caller, caller_of

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
MAX_AGE_S = 2.0

SCHEME = "bearer"
LOOKUP_CHARS = 16
"""Keys are found by so much of their digest; whether it is this very key is decided in constant time."""


class Door(Protocol):
    """Lets clients in."""

    async def caller(self, sent: Sequence[str]) -> Caller:
        """Return who sends these `Authorization` headers; raise `AuthenticationFailed` or `Unavailable`."""


class OpenDoor:
    """Of a gateway without keys: everybody is the same caller, whatever they send."""

    async def caller(self, sent: Sequence[str]) -> Caller:
        """Return anyone."""
        return ANYONE


class Keyring:
    """Of a gateway with keys. `clock` and `wall_clock` return seconds, the latter since 1970."""

    def __init__(
        self,
        store: KeyStore,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._version: str | None = None
        self._keys: dict[str, list[ApiKey]] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._is_failing = False

    async def caller(self, sent: Sequence[str]) -> Caller:
        """Return whose key this is."""
        digest = digest_of(_key_in(sent))
        if self._clock() - self._read_at > MAX_AGE_S:
            await self._refresh_with_others()
        for key in self._keys.get(digest[:LOOKUP_CHARS], ()):
            if hmac.compare_digest(key.digest, digest) and not self._is_expired(key):
                return caller_of(key)
        raise AuthenticationFailed("Incorrect API key provided.")

    async def refresh(self) -> None:
        """Read the keys if they have changed; raise `Unavailable` or `InvalidSetting`."""
        began_at = self._clock()
        listing = await self._store.read(self._version)
        if listing is not None:
            self._take(listing)
        self._read_at = max(self._read_at, began_at)
        if self._is_failing:
            self._is_failing = False
            logger.info("API keys can be read again")

    async def watch(self) -> None:
        """Refresh until cancelled."""
        while True:
            try:
                await self.refresh()
            except (Unavailable, InvalidSetting) as error:
                self._note_failure(error)
            await asyncio.sleep(REFRESH_S)

    async def _refresh_with_others(self) -> None:
        """Refresh once for all who wait for it."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.refresh(), name="read API keys")
        try:
            await asyncio.shield(self._reading)
        except (Unavailable, InvalidSetting) as error:
            self._note_failure(error)
            raise Unavailable("API keys cannot be checked now.") from error

    def _take(self, listing: KeyListing) -> None:
        keys: defaultdict[str, list[ApiKey]] = defaultdict(list)
        for key in listing.keys:
            keys[key.digest[:LOOKUP_CHARS]].append(key)
        self._keys, self._version = dict(keys), listing.version
        logger.info("API keys read", extra={"num_keys": len(listing.keys)})

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.error("API keys cannot be read: %s", error)

    def _is_expired(self, key: ApiKey) -> bool:
        return key.expires is not None and key.expires <= self._wall_clock()


def _key_in(sent: Sequence[str]) -> str:
    """Return the only key among these headers."""
    if not sent:
        raise AuthenticationFailed("No API key: send it as `Authorization: Bearer <key>`.", code="missing_api_key")
    if len(sent) > 1:
        raise AuthenticationFailed("More than one `Authorization` header.")
    scheme, _, key = sent[0].strip().partition(" ")
    if scheme.lower() != SCHEME or not is_well_formed(key.strip()):
        raise AuthenticationFailed("Incorrect API key provided.")
    return key.strip()
