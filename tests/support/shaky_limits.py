"""Limits behind a Redis that can be away, slow, or lose its replies."""

import asyncio
from collections.abc import Callable, Mapping

from common.broker.limits import Demand, Verdict
from common.broker.memory_limits import MemoryLimits
from common.errors import BrokerUnavailable
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits


class ShakyLimits(MemoryLimits):
    """`is_away`: nothing arrives. `loses_replies`: a reservation arrives, its reply does not. `gate`: reservations have
    arrived and their replies wait for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.is_away = False
        self.loses_replies = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_reservations = 0
        self.num_looks = 0

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        self._arrive()
        self.num_reservations += 1
        verdict = await super().reserve(tenant, limits, request, demand)
        await self.gate.wait()
        if self.loses_replies:
            raise BrokerUnavailable("the reply is lost")
        return verdict

    async def settle(self, tenant: TenantId, limits: TenantLimits, request: RequestId, num_tokens: int) -> Verdict:
        self._arrive()
        return await super().settle(tenant, limits, request, num_tokens)

    async def release(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        self._arrive()
        await super().release(tenant, request, num_tokens)

    async def renew(self, tenant: TenantId, permits: Mapping[RequestId, int]) -> None:
        self._arrive()
        await super().renew(tenant, permits)

    async def look(self) -> None:
        self._arrive()
        self.num_looks += 1

    def _arrive(self) -> None:
        if self.is_away:
            raise BrokerUnavailable("Redis is away")
