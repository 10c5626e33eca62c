"""A request within the limits of its tenant: reserved by an estimate, settled, charged for what it has used."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, assert_never

from common.broker.limits import Limit, Refusal, Verdict
from common.errors import RateLimited, Unavailable
from gateway.callers import Caller
from gateway.claims import Claim
from gateway.tenant_permits import TenantPermits


class Metering(Protocol):
    """What a request holds of its tenant's limits while it is in progress."""

    @property
    def caller(self) -> Caller:
        """Whose limits and fair share it counts against."""

    async def settle(self, num_prompt_tokens: int) -> None:
        """Charge the prompt as it is in place of its estimate; raise `RateLimited`, and nothing is charged."""


class Unmetered:
    """Of a tenant without limits: nobody is asked."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def settle(self, num_prompt_tokens: int) -> None:
        """Do nothing."""


class Metered:
    """Of a tenant with limits: a permit while entered. `retry_after_s` estimates when one of its requests ends.

    What Redis does not grant within its time is `BrokerUnavailable`: without it nobody knows what the tenant uses.
    """

    def __init__(self, tenants: TenantPermits, claim: Claim, retry_after_s: Callable[[], float]) -> None:
        self._tenants = tenants
        self._claim = claim
        self._retry_after_s = retry_after_s
        self.caller = claim.caller

    async def __aenter__(self) -> Self:
        caller, claim = self._claim.caller, self._claim
        demand = claim.demand(claim.num_prompt_tokens)
        self._judge(await self._tenants.reserve(caller.tenant, caller.limits, claim.request, demand), demand.num_tokens)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        meter = self._claim.meter
        is_unserved = isinstance(error, Unavailable | RateLimited) and not meter.num_tokens
        num_used = None if is_unserved else meter.num_prompt_tokens + meter.num_tokens
        self._tenants.release(self._claim.caller.tenant, self._claim.request, num_used)

    async def settle(self, num_prompt_tokens: int) -> None:
        """Charge the prompt as it is in place of its estimate; raise `RateLimited`, and nothing is charged."""
        caller, num_tokens = self._claim.caller, self._claim.demand(num_prompt_tokens).num_tokens
        if caller.limits.tokens_per_minute is not None:
            verdict = await self._tenants.settle(caller.tenant, caller.limits, self._claim.request, num_tokens)
            self._judge(verdict, num_tokens)

    def _judge(self, verdict: Verdict, num_tokens: int) -> None:
        self._claim.on_quota(verdict.quota)
        if verdict.refusal is not None:
            wait_s = self._retry_after_s() if verdict.refusal.wait_s is None else verdict.refusal.wait_s
            message = self._told(verdict.refusal, num_tokens)
            raise RateLimited(message, limit=verdict.refusal.limit, retry_after_s=wait_s)

    def _told(self, refusal: Refusal, num_tokens: int) -> str:
        limits, num_choices = self._claim.caller.limits, self._claim.num_choices
        match refusal.limit:
            case Limit.REQUESTS:
                bound, wanted = f"{limits.requests_per_minute} requests per minute", f"counts as {num_choices}"
            case Limit.TOKENS:
                bound, wanted = f"{limits.tokens_per_minute} tokens per minute", f"may take {num_tokens}"
            case Limit.CONCURRENCY:
                bound, wanted = f"{limits.max_concurrent} requests at once", f"counts as {num_choices}"
            case never:
                assert_never(never)
        return f"This API key is limited to {bound}; this request {wanted}."
