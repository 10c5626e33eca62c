"""A gateway's part of its tenants' limits: every permit it holds in Redis is renewed while it is held, and released.

A reservation whose reply is lost, or whose client leaves meanwhile, is released by its name like any other. Releases go
on in the background until Redis takes them, so that the end of an answer waits for nobody.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from common.broker.backoff import backoff
from common.broker.limits import Demand, Limits, Verdict
from common.errors import BrokerUnavailable
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits

logger = logging.getLogger(__name__)

BEAT_S = 2.0
"""A third of a permit's lease."""

RELEASE_TIMEOUT_S = 30.0
"""So long is Redis asked to take a permit back; its lease has ended by then."""

CLOSE_TIMEOUT_S = 2.0


class TenantPermits:
    """The permits that this gateway holds. Owned by its event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: defaultdict[TenantId, dict[RequestId, int]] = defaultdict(dict)
        self._leaving: defaultdict[TenantId, set[asyncio.Future[None]]] = defaultdict(set)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        """Permits that were granted and not given back."""
        return sum(map(len, self._held.values()))

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        """Ask for a permit; what was granted must be released. Raises `BrokerUnavailable`."""
        if leaving := self._leaving.get(tenant):  # whoever got the end of its answer just now may come again at once
            await asyncio.wait(tuple(leaving))
        try:
            verdict = await self._limits.reserve(tenant, limits, request, demand)
        except BaseException:
            self._give_back(tenant, request, None)
            raise
        if verdict.refusal is None:  # not before: what is renewed and was refused would be held by nobody
            self._held[tenant][request] = demand.num_choices
        return verdict

    async def settle(self, tenant: TenantId, limits: TenantLimits, request: RequestId, num_tokens: int) -> Verdict:
        """Put the tokens that are really wanted in place of the estimate; a refusal leaves a permit to be released."""
        return await self._limits.settle(tenant, limits, request, num_tokens)

    def release(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        """Give a permit back, in the background; see `Limits.release`. A second release does nothing."""
        if request not in self._held.get(tenant, ()):
            return
        self._forget(tenant, request)
        self._give_back(tenant, request, num_tokens)

    async def watch(self) -> None:
        """Renew what is held until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew all leases, with one call per tenant; without any, look whether Redis is there."""
        held = {tenant: dict(permits) for tenant, permits in self._held.items() if permits}
        try:
            await asyncio.gather(*(self._limits.renew(tenant, permits) for tenant, permits in held.items()))
            if not held:
                await self._limits.look()
        except BrokerUnavailable as error:
            logger.warning("permits not renewed: %s", error)

    async def close(self) -> None:
        """Let the last releases go out, briefly."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _forget(self, tenant: TenantId, request: RequestId) -> None:
        permits = self._held[tenant]
        del permits[request]
        if not permits:
            del self._held[tenant]

    def _give_back(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        first_attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaving[tenant].add(first_attempt)
        self._spawn(self._release(tenant, request, num_tokens, first_attempt))

    async def _release(
        self, tenant: TenantId, request: RequestId, num_tokens: int | None, first_attempt: "asyncio.Future[None]"
    ) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                for delay_s in backoff(random.random):
                    if await self._is_released(tenant, request, num_tokens):
                        return
                    self._is_attempted(tenant, first_attempt)
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            logger.warning("permit not released: Redis stays away", extra={"request_id": request})
        finally:
            self._is_attempted(tenant, first_attempt)

    async def _is_released(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> bool:
        try:
            await self._limits.release(tenant, request, num_tokens)
        except BrokerUnavailable as error:
            logger.info("permit not released: %s", error, extra={"request_id": request})
            return False
        return True

    def _is_attempted(self, tenant: TenantId, first_attempt: "asyncio.Future[None]") -> None:
        if first_attempt.done():
            return
        first_attempt.set_result(None)
        leaving = self._leaving[tenant]
        leaving.discard(first_attempt)
        if not leaving:
            del self._leaving[tenant]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
