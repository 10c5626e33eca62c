"""Tenants' limits in memory: the same answers as Redis gives, for one process and its tests."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from common.broker.limits import (
    NUM_STEPS,
    Allowance,
    Demand,
    Limit,
    Quota,
    Refusal,
    Verdict,
)
from common.broker.policy import BrokerPolicy
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits


@dataclass(slots=True)
class _Permit:
    """`tokens` were charged in step `charged` (None: they have no limit), the request itself in `step`."""

    num_choices: int
    step: int
    ends_s: float
    tokens: int | None = None
    charged: int = 0


class _Window:
    """What was charged in each step."""

    def __init__(self, step_ms: int) -> None:
        self._step_ms: Final = step_ms
        self._charges: Counter[int] = Counter()

    def total(self, step: int) -> int:
        """Return what counts now."""
        for charged in [charged for charged in self._charges if charged < step - NUM_STEPS]:
            del self._charges[charged]
        return self._charges.total()

    def charge(self, step: int, amount: int) -> None:
        """Count an amount in a step."""
        self._charges[step] += amount

    def refund(self, step: int, amount: int) -> None:
        """Take back what was charged in an earlier step, unless it counts no more."""
        self._charges[step] -= min(self._charges[step], amount)

    def wait_ms(self, now_ms: int, limit: int, amount: int) -> int:
        """Return the time until `amount` fits; 0 is now. Nothing always fits, also where more was used than allowed."""
        step = now_ms // self._step_ms
        excess = self.total(step) + amount - limit
        if excess <= 0 or amount == 0:
            return 0
        for charged in sorted(self._charges):
            excess -= self._charges[charged]
            if excess <= 0:
                return self._leaves_at(charged) - now_ms
        return self._leaves_at(step) - now_ms

    def allowance(self, now_ms: int, limit: int) -> Allowance:
        """Return what is left."""
        total = self.total(now_ms // self._step_ms)
        newest = max((step for step, amount in self._charges.items() if amount), default=None)
        reset_ms = 0 if newest is None else self._leaves_at(newest) - now_ms
        return Allowance(limit, max(0, limit - total), reset_ms / 1000)

    def _leaves_at(self, charged: int) -> int:
        return (charged + NUM_STEPS + 1) * self._step_ms


@dataclass(slots=True)
class _Account:
    """What one tenant uses."""

    requests: _Window
    tokens: _Window
    permits: dict[RequestId, _Permit] = field(default_factory=dict)
    over: dict[RequestId, float] = field(default_factory=dict)


class MemoryLimits:
    """What tenants use; the gateways of a test share one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, policy: BrokerPolicy | None = None) -> None:
        self._clock: Final = clock
        self._policy: Final = policy or BrokerPolicy()
        self._step_ms: Final = round(self._policy.limit_window_s / NUM_STEPS * 1000)
        self._accounts: defaultdict[TenantId, _Account] = defaultdict(
            lambda: _Account(_Window(self._step_ms), _Window(self._step_ms))
        )

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        """Give the request a permit and charge its demand, or refuse and charge nothing."""
        account = self._swept(tenant)
        if request in account.over:
            return Verdict(self._quota(account, limits), Refusal(Limit.CONCURRENCY, None))
        if request in account.permits:
            return Verdict(self._quota(account, limits))
        refusal = self._refusal(account, limits, demand)
        if refusal is None:
            self._charge(account, limits, request, demand)
        return Verdict(self._quota(account, limits), refusal)

    async def settle(self, tenant: TenantId, limits: TenantLimits, request: RequestId, num_tokens: int) -> Verdict:
        """Charge `num_tokens` in place of the tokens of the demand; a refusal takes the permit away and refunds all."""
        account = self._swept(tenant)
        permit = account.permits.get(request)
        if permit is None or permit.tokens is None or limits.tokens_per_minute is None:
            return Verdict(self._quota(account, limits))
        account.tokens.refund(permit.charged, permit.tokens)
        wait_ms = account.tokens.wait_ms(self._now_ms(), limits.tokens_per_minute, num_tokens)
        if wait_ms > 0:
            account.requests.refund(permit.step, permit.num_choices)
            self._end(account, request)
            return Verdict(self._quota(account, limits), Refusal(Limit.TOKENS, wait_ms / 1000))
        account.tokens.charge(self._step(), num_tokens)
        permit.tokens, permit.charged = num_tokens, self._step()
        return Verdict(self._quota(account, limits))

    async def release(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        """Take the permit back and charge the tokens that were really used; None: refund all."""
        account = self._accounts[tenant]
        permit = account.permits.get(request)
        self._end(account, request)
        if permit is None:
            return
        if num_tokens is None:
            account.requests.refund(permit.step, permit.num_choices)
        if permit.tokens is not None:
            more = (num_tokens or 0) - permit.tokens
            if more > 0:
                account.tokens.charge(self._step(), more)
            else:
                account.tokens.refund(permit.charged, -more)

    async def renew(self, tenant: TenantId, permits: Mapping[RequestId, int]) -> None:
        """Renew the leases of these permits; those that were lost are held again."""
        account = self._accounts[tenant]
        ends_s = self._clock() + self._policy.permit_ttl_s
        for request, num_choices in permits.items():
            if request not in account.over:
                permit = account.permits.setdefault(request, _Permit(num_choices, self._step(), ends_s))
                permit.ends_s = ends_s

    async def look(self) -> None:
        """It is there."""

    def _refusal(self, account: _Account, limits: TenantLimits, demand: Demand) -> Refusal | None:
        now_ms = self._now_ms()
        waits_ms = {Limit.REQUESTS: 0, Limit.TOKENS: 0}
        if limits.requests_per_minute is not None:
            waits_ms[Limit.REQUESTS] = account.requests.wait_ms(now_ms, limits.requests_per_minute, demand.num_choices)
        if limits.tokens_per_minute is not None:
            waits_ms[Limit.TOKENS] = account.tokens.wait_ms(now_ms, limits.tokens_per_minute, demand.num_tokens)
        longest = max(waits_ms, key=lambda limit: waits_ms[limit])
        if waits_ms[longest] > 0:
            return Refusal(longest, waits_ms[longest] / 1000)
        num_held = sum(permit.num_choices for permit in account.permits.values())
        if limits.max_concurrent is not None and num_held + demand.num_choices > limits.max_concurrent:
            return Refusal(Limit.CONCURRENCY, None)
        return None

    def _charge(self, account: _Account, limits: TenantLimits, request: RequestId, demand: Demand) -> None:
        step = self._step()
        permit = _Permit(demand.num_choices, step, self._clock() + self._policy.permit_ttl_s, charged=step)
        if limits.requests_per_minute is not None:
            account.requests.charge(step, demand.num_choices)
        if limits.tokens_per_minute is not None:
            account.tokens.charge(step, demand.num_tokens)
            permit.tokens = demand.num_tokens
        account.permits[request] = permit

    def _quota(self, account: _Account, limits: TenantLimits) -> Quota:
        now_ms, per_minute = self._now_ms(), (limits.requests_per_minute, limits.tokens_per_minute)
        windows = (account.requests, account.tokens)
        allowances = [
            None if limit is None else window.allowance(now_ms, limit)
            for window, limit in zip(windows, per_minute, strict=True)
        ]
        return Quota(*allowances)

    def _swept(self, tenant: TenantId) -> _Account:
        """Return the account without the permits of dead gateways."""
        account, now_s = self._accounts[tenant], self._clock()
        account.permits = {request: permit for request, permit in account.permits.items() if permit.ends_s > now_s}
        account.over = {request: ends_s for request, ends_s in account.over.items() if ends_s > now_s}
        return account

    def _end(self, account: _Account, request: RequestId) -> None:
        account.permits.pop(request, None)
        account.over[request] = self._clock() + self._policy.permit_ttl_s

    def _step(self) -> int:
        return self._now_ms() // self._step_ms

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)
