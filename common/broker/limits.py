"""The seam of tenants' limits: what one API key may use, counted over all gateways in one place.

A request holds a *permit* under its own id, from its reservation to its release: a leased member of a set, so that what
a killed gateway held comes back when its leases end, and what a gateway did not hear of can be released by name.
Requests and tokens are counted in a window of a minute that slides in steps of a second: within no 60 s is more than
the limit let in, and what was charged counts for 60 to 61 s. (A token bucket is cheaper, but lets in twice its limit
within the first minute.) All limits are looked at in one step: a refusal charges none of them.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits

NUM_STEPS: Final = 60
"""The window slides in so many steps."""


class Limit(enum.StrEnum):
    """What a tenant may use so much of."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Allowance:
    """One limit now: how much of it is left, and after how long it is whole again if nothing else is used."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant has left of its minute; None: that has no limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit is reached, and when there is room; None: nobody knows."""

    limit: Limit
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tenant may (`refusal` is None), and what it has left."""

    quota: Quota
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants of its tenant's limits: a place for every choice, and tokens of prompt and answers."""

    num_choices: int
    num_tokens: int


class Limits(Protocol):
    """What tenants use. Every method raises `BrokerUnavailable` when Redis cannot be reached in time; what the call has
    done then is unknown, and `release` undoes it."""

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        """Give the request a permit and charge its demand, or refuse and charge nothing.

        Idempotent by request. A request that has been released already is refused.
        """

    async def settle(self, tenant: TenantId, limits: TenantLimits, request: RequestId, num_tokens: int) -> Verdict:
        """Charge `num_tokens` in place of the tokens of the demand; a refusal takes the permit away and refunds all."""

    async def release(self, tenant: TenantId, request: RequestId, num_tokens: int | None) -> None:
        """Take the permit back and charge the tokens that were really used; None: it was not served, refund all.

        A reservation or renewal of the request that arrives later does nothing. A second release does nothing.
        """

    async def renew(self, tenant: TenantId, permits: Mapping[RequestId, int]) -> None:
        """Renew the leases of these permits (request -> its choices); those that Redis has lost are held again."""

    async def look(self) -> None:
        """Find out whether Redis is there: leases that end because it was away must not count as ended."""
