"""A tenant's limits around a request: refused before anything is done, and given back whatever becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from common.broker.limits import Quota
from common.errors import BrokerUnavailable, Draining, GenerationFailed, InvalidRequest, Overloaded, RateLimited
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits
from gateway.admission import Admission
from gateway.callers import Caller
from gateway.claims import DEFAULT_ANSWER_TOKENS, Claim, estimated_tokens
from gateway.tenant_permits import TenantPermits
from tests.support.polling import turns, until
from tests.support.shaky_limits import ShakyLimits

ALICE = TenantId("key-a")
ONE_AT_ONCE = TenantLimits(max_concurrent=1)


@dataclass
class Used:
    num_prompt_tokens: int = 0
    num_tokens: int = 0


class Gateway:
    """Admission over limits that can fail. Time stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.limits = ShakyLimits(lambda: self.now_s)
        self.tenants = TenantPermits(self.limits)
        self.admission = Admission(8, self.tenants)
        self.quotas: list[Quota] = []
        self._num_requests = 0

    def claim(
        self,
        limits: TenantLimits = ONE_AT_ONCE,
        *,
        num_choices: int = 1,
        num_prompt_tokens: int = 10,
        max_tokens: int | None = 5,
        used: Used | None = None,
    ) -> Claim:
        self._num_requests += 1
        return Claim(
            Caller(ALICE, limits),
            RequestId(f"r{self._num_requests}"),
            num_choices,
            num_prompt_tokens,
            max_tokens,
            used or Used(),
            self.quotas.append,
        )

    async def is_admitted(self, claim: Claim) -> bool:
        """Serve a request that takes no time; False: its key's limits refuse it."""
        try:
            async with self.admission.reserve(claim):
                return True
        except RateLimited:
            return False

    async def hold(self, claim: Claim) -> None:
        """Be in progress until cancelled."""
        async with self.admission.reserve(claim):
            await asyncio.Event().wait()

    async def assert_free(self) -> None:
        """The tenant's only place is free at once, and nothing is held here."""
        assert await self.is_admitted(self.claim())
        assert (self.admission.num_running, self.tenants.num_held) == (0, 0)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    await made.tenants.close()


async def test_a_place_is_held_while_entered_and_no_longer(gateway: Gateway) -> None:
    async with gateway.admission.reserve(gateway.claim()):
        with pytest.raises(RateLimited) as caught:
            async with gateway.admission.reserve(gateway.claim()):
                pass
        assert caught.value.limit == "concurrency"
        assert caught.value.retry_after_s >= 1
        assert gateway.admission.num_running == 1
    await gateway.assert_free()


async def test_a_tenant_without_limits_asks_nobody(gateway: Gateway) -> None:
    gateway.limits.is_away = True
    assert await gateway.is_admitted(gateway.claim(TenantLimits()))
    assert gateway.limits.num_reservations == 0


async def test_a_tenant_with_limits_is_not_served_without_redis(gateway: Gateway) -> None:
    gateway.limits.is_away = True
    with pytest.raises(BrokerUnavailable):
        await gateway.is_admitted(gateway.claim())
    assert gateway.admission.num_running == 0


async def test_the_gateways_own_bound_comes_first_and_counts_choices(gateway: Gateway) -> None:
    async with gateway.admission.reserve(gateway.claim(TenantLimits(), num_choices=7)):
        assert gateway.admission.num_running == 7
        with pytest.raises(Overloaded):
            await gateway.is_admitted(gateway.claim(num_choices=2))
        assert gateway.limits.num_reservations == 0
    assert gateway.admission.num_running == 0
    with pytest.raises(InvalidRequest, match="`n` is 9"):
        await gateway.is_admitted(gateway.claim(num_choices=9))


@pytest.mark.parametrize("failure", [GenerationFailed("x"), ValueError(), asyncio.CancelledError(), TimeoutError()])
async def test_b104_the_place_is_free_after_any_end(gateway: Gateway, failure: BaseException) -> None:
    with suppress(type(failure)):
        async with gateway.admission.reserve(gateway.claim()):
            raise failure
    await gateway.assert_free()


async def test_b104_a_client_that_leaves_while_redis_answers_holds_nothing(gateway: Gateway) -> None:
    gateway.limits.gate.clear()
    leaving = asyncio.create_task(gateway.hold(gateway.claim()))
    await until(lambda: gateway.limits.num_reservations == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gateway.limits.gate.set()
    await gateway.assert_free()


async def test_b104_a_place_whose_reply_was_lost_is_given_back(gateway: Gateway) -> None:
    gateway.limits.loses_replies = True
    with pytest.raises(BrokerUnavailable):
        await gateway.is_admitted(gateway.claim())
    gateway.limits.loses_replies = False
    await gateway.assert_free()


async def test_b104_a_release_is_repeated_until_redis_takes_it(gateway: Gateway) -> None:
    async with gateway.admission.reserve(gateway.claim()):
        gateway.limits.is_away = True
    assert gateway.tenants.num_held == 0
    await turns()
    gateway.limits.is_away = False

    async def is_free() -> bool:
        return await gateway.is_admitted(gateway.claim())

    await until(is_free, "the place is free")


async def test_b104_leases_are_renewed_as_long_as_they_are_held(gateway: Gateway) -> None:
    holding = asyncio.create_task(gateway.hold(gateway.claim()))
    await until(lambda: gateway.limits.num_reservations == 1)
    for _ in range(5):
        gateway.now_s += 4.0
        await gateway.tenants.renew()
        assert not await gateway.is_admitted(gateway.claim())
    gateway.now_s += 7.0  # a lease later: this gateway was killed
    assert await gateway.is_admitted(gateway.claim())
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_b104_a_renewal_between_a_refusal_and_its_reply_holds_nothing(gateway: Gateway) -> None:
    async with gateway.admission.reserve(gateway.claim()):
        gateway.limits.gate.clear()
        refused = asyncio.create_task(gateway.is_admitted(gateway.claim()))
        await until(lambda: gateway.limits.num_reservations == 2)
        await gateway.tenants.renew()
        gateway.limits.gate.set()
        assert not await refused
    await gateway.assert_free()


async def test_who_holds_nothing_looks_whether_redis_is_there(gateway: Gateway) -> None:
    await gateway.tenants.renew()
    assert gateway.limits.num_looks == 1
    gateway.limits.is_away = True
    await gateway.tenants.renew()  # told in the log


async def test_a_cut_request_gives_its_place_back(gateway: Gateway) -> None:
    holding = asyncio.create_task(gateway.hold(gateway.claim()))
    await until(lambda: gateway.tenants.num_held == 1)
    assert gateway.admission.end() == 1
    with pytest.raises(Draining):
        await holding
    await until(lambda: gateway.tenants.num_held == 0)


async def test_a_request_is_cut_while_redis_answers(gateway: Gateway) -> None:
    gateway.limits.gate.clear()
    holding = asyncio.create_task(gateway.hold(gateway.claim()))
    await until(lambda: gateway.limits.num_reservations == 1)
    assert gateway.admission.end() == 1
    with pytest.raises(Draining):
        await holding
    assert (gateway.admission.num_running, gateway.tenants.num_held) == (0, 0)


class TestCharges:
    LIMITS = TenantLimits(requests_per_minute=3, tokens_per_minute=100)

    async def remaining(self, gateway: Gateway) -> tuple[int, int]:
        """Return what is left of requests and tokens, by a request that costs nothing."""
        claim = gateway.claim(self.LIMITS, num_prompt_tokens=0, max_tokens=0)
        with suppress(Overloaded, RateLimited):
            async with gateway.admission.reserve(claim):
                raise Overloaded("not served")
        quota = gateway.quotas[-1]
        assert quota.requests is not None
        assert quota.tokens is not None
        return quota.requests.remaining, quota.tokens.remaining

    async def test_what_was_used_stays_charged(self, gateway: Gateway) -> None:
        used = Used()
        async with gateway.admission.reserve(gateway.claim(self.LIMITS, max_tokens=50, used=used)) as metering:
            await metering.settle(12)
            used.num_prompt_tokens, used.num_tokens = 12, 30
        assert await self.remaining(gateway) == (1, 58)

    async def test_b106_who_was_not_served_is_charged_nothing(self, gateway: Gateway) -> None:
        with pytest.raises(Overloaded):
            async with gateway.admission.reserve(gateway.claim(self.LIMITS, used=Used(10, 0))):
                raise Overloaded("the queue is full")
        assert await self.remaining(gateway) == (2, 100)

    async def test_a_prompt_longer_than_estimated_is_refused_before_it_costs(self, gateway: Gateway) -> None:
        with pytest.raises(RateLimited) as caught:
            async with gateway.admission.reserve(gateway.claim(self.LIMITS)) as metering:
                await metering.settle(96)
        assert caught.value.limit == "tokens"
        assert "limited to 100 tokens per minute; this request may take 101" in str(caught.value)
        assert await self.remaining(gateway) == (2, 100)

    async def test_each_choice_is_charged_its_own_answer(self, gateway: Gateway) -> None:
        async with gateway.admission.reserve(gateway.claim(self.LIMITS, num_choices=2, max_tokens=40)):
            quota = gateway.quotas[-1]
        assert quota.requests is not None
        assert quota.tokens is not None
        assert (quota.requests.remaining, quota.tokens.remaining) == (1, 10)

    async def test_an_answer_without_max_tokens_is_charged_a_usual_one(self, gateway: Gateway) -> None:
        claim = gateway.claim(TenantLimits(tokens_per_minute=1000), max_tokens=None)
        assert claim.demand(10).num_tokens == 10 + DEFAULT_ANSWER_TOKENS


@pytest.mark.parametrize(("num_bytes", "num_tokens"), [(0, 1), (3, 1), (400, 100)])
def test_a_prompt_is_estimated_by_its_bytes(num_bytes: int, num_tokens: int) -> None:
    assert estimated_tokens(num_bytes) == num_tokens
