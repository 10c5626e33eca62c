"""Tenants' limits over Redis: counted in Lua, atomically over all gateways, in Redis' own time."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from common.broker import scripts
from common.broker.connection import RedisConnection
from common.broker.keys import tenant_keys
from common.broker.limits import NUM_STEPS, Allowance, Demand, Limit, Quota, Refusal, Verdict
from common.broker.pipeline import Argument
from common.broker.policy import BrokerPolicy
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits

NOBODY: Final = RequestId("")


class RedisLimits:
    """What tenants use, by one gateway; leases that end because Redis was away go on for one more TTL.

    Whether it was is judged by the time between two answers: who has nothing to renew must `look` now and then.
    """

    def __init__(
        self,
        connection: RedisConnection,
        policy: BrokerPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection: Final = connection
        self._policy: Final = policy or BrokerPolicy()
        self._clock: Final = clock
        self._answered_at = clock()
        self._grace_ends_at = float("-inf")

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        """Give the request a permit and charge its demand, or refuse and charge nothing."""
        bounds = (*_bounds(limits), _bound(limits.max_concurrent))
        answer = await self._run(
            scripts.RESERVE_PERMIT, tenant, request, *bounds, demand.num_choices, demand.num_tokens
        )
        return _verdict(limits, answer)

    async def settle(self, tenant: TenantId, limits: TenantLimits, request: RequestId, num_tokens: int) -> Verdict:
        """Charge `num_tokens` in place of the tokens of the demand; a refusal takes the permit away and refunds all."""
        return _verdict(limits, await self._run(scripts.SETTLE_PERMIT, tenant, request, *_bounds(limits), num_tokens))

    async def release(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        """Take the permit back and charge the tokens that were really used; None: refund all."""
        await self._run(scripts.RELEASE_PERMIT, tenant, request, _bound(num_tokens))

    async def renew(self, tenant: TenantId, permits: Mapping[RequestId, int]) -> None:
        """Renew the leases of these permits; those that Redis has lost are held again."""
        pairs = [value for permit in permits.items() for value in permit]
        await self._run(scripts.RENEW_PERMITS, tenant, NOBODY, *pairs)

    async def look(self) -> None:
        """Find out whether Redis is there."""
        await self._connection.call("PING")
        self._note_answer()

    async def _run(self, script: scripts.Script, tenant: TenantId, request: RequestId, *arguments: Argument) -> Any:  # noqa: ANN401 - the answer of a script
        policy = self._policy
        answer = await self._connection.run(
            script,
            tenant_keys(tenant),
            scripts.milliseconds(policy.limit_window_s / NUM_STEPS),
            scripts.milliseconds(policy.permit_ttl_s),
            int(self._was_away()),
            request,
            *arguments,
        )
        self._note_answer()
        return answer

    def _was_away(self) -> bool:
        now = self._clock()
        return now < self._grace_ends_at or now - self._answered_at > self._policy.permit_ttl_s / 2

    def _note_answer(self) -> None:
        now = self._clock()
        if now - self._answered_at > self._policy.permit_ttl_s / 2:
            self._grace_ends_at = now + self._policy.permit_ttl_s
        self._answered_at = now


def _bound(bound: int | None) -> Argument:
    return "" if bound is None else bound


def _bounds(limits: TenantLimits) -> tuple[Argument, Argument]:
    return _bound(limits.requests_per_minute), _bound(limits.tokens_per_minute)


def _verdict(limits: TenantLimits, answer: list[Any]) -> Verdict:
    name, wait_ms, requests, tokens = answer
    quota = Quota(_allowance(limits.requests_per_minute, requests), _allowance(limits.tokens_per_minute, tokens))
    if not name:
        return Verdict(quota)
    limit = Limit(name.decode())
    return Verdict(quota, Refusal(limit, None if limit is Limit.CONCURRENCY else wait_ms / 1000))


def _allowance(limit: int | None, used: list[int]) -> Allowance | None:
    if limit is None:
        return None
    amount, reset_ms = used
    return Allowance(limit, max(0, limit - amount), reset_ms / 1000)
