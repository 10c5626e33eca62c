"""What every broker promises about the limits of tenants: atomic, exact, and nothing leaks."""

import asyncio

import pytest

from common.broker.limits import Demand, Limit, Limits, Verdict
from common.broker.policy import BrokerPolicy
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits
from tests.support.broker_harness import Harness

ALICE, BOB = TenantId("alice"), TenantId("bob")
A, B, C, D = (RequestId(name) for name in "abcd")
ONE = Demand(1, 10)
SHORT_MINUTE = BrokerPolicy(limit_window_s=0.6)
BRIEF_LEASES = BrokerPolicy(permit_ttl_s=2.7)


def is_granted(verdict: Verdict) -> bool:
    return verdict.refusal is None


async def reserve(
    limits: Limits, bounds: TenantLimits, request: RequestId, demand: Demand = ONE, tenant: TenantId = ALICE
) -> str:
    """Return the limit that refuses, "" if none does."""
    verdict = await limits.reserve(tenant, bounds, request, demand)
    return "" if verdict.refusal is None else verdict.refusal.limit


class TestConcurrency:
    BOUNDS = TenantLimits(max_concurrent=2)

    async def test_a_place_for_each_until_one_is_released(self, harness: Harness) -> None:
        limits = harness.limits()
        assert [await reserve(limits, self.BOUNDS, request) for request in (A, B, C)] == ["", "", Limit.CONCURRENCY]
        await limits.release(ALICE, A, 0)
        assert await reserve(limits, self.BOUNDS, C) == ""
        assert await reserve(limits, self.BOUNDS, D) == Limit.CONCURRENCY

    async def test_n_choices_count_as_n(self, harness: Harness) -> None:
        limits = harness.limits()
        assert await reserve(limits, self.BOUNDS, A, Demand(2, 1)) == ""
        assert await reserve(limits, self.BOUNDS, B) == Limit.CONCURRENCY
        await limits.release(ALICE, A, 0)
        assert await reserve(limits, self.BOUNDS, B) == ""
        assert await reserve(limits, self.BOUNDS, C, Demand(2, 1)) == Limit.CONCURRENCY

    async def test_tenants_do_not_count_together(self, harness: Harness) -> None:
        limits = harness.limits()
        for tenant in (ALICE, BOB):
            assert [await reserve(limits, self.BOUNDS, request, tenant=tenant) for request in (A, B)] == ["", ""]

    async def test_a_repeated_reservation_takes_no_second_place(self, harness: Harness) -> None:
        limits = harness.limits()
        assert [await reserve(limits, self.BOUNDS, request) for request in (A, A, A, B)] == [""] * 4

    async def test_b104_a_second_release_frees_nothing_of_others(self, harness: Harness) -> None:
        limits = harness.limits()
        for request in (A, B):
            await reserve(limits, self.BOUNDS, request)
        for _ in range(3):
            await limits.release(ALICE, A, 0)
        assert await reserve(limits, self.BOUNDS, C) == ""
        assert await reserve(limits, self.BOUNDS, D) == Limit.CONCURRENCY

    async def test_b104_what_a_killed_gateway_held_is_free_when_its_leases_end(self, harness: Harness) -> None:
        limits = harness.limits(BRIEF_LEASES)
        for request in (A, B):
            await reserve(limits, self.BOUNDS, request)
        await harness.elapse(0.91)
        assert await reserve(limits, self.BOUNDS, C) == Limit.CONCURRENCY
        await limits.renew(ALICE, {B: 1})
        await harness.elapse(0.91)
        await limits.renew(ALICE, {B: 1})
        await harness.elapse(0.91)
        assert await reserve(limits, self.BOUNDS, C) == ""
        assert await reserve(limits, self.BOUNDS, D) == Limit.CONCURRENCY

    async def test_b104_a_reservation_that_arrives_after_its_release_holds_nothing(self, harness: Harness) -> None:
        limits = harness.limits()
        await limits.release(ALICE, A, None)
        assert await reserve(limits, self.BOUNDS, A) == Limit.CONCURRENCY
        assert [await reserve(limits, self.BOUNDS, request) for request in (B, C)] == ["", ""]

    async def test_b104_a_renewal_that_arrives_after_its_release_holds_nothing(self, harness: Harness) -> None:
        limits = harness.limits()
        await reserve(limits, self.BOUNDS, A)
        await limits.release(ALICE, A, 0)
        await limits.renew(ALICE, {A: 1})
        assert [await reserve(limits, self.BOUNDS, request) for request in (B, C)] == ["", ""]

    async def test_renewed_permits_that_were_lost_are_held_again(self, harness: Harness) -> None:
        limits = harness.limits()
        await limits.renew(ALICE, {A: 2})
        assert await reserve(limits, self.BOUNDS, B) == Limit.CONCURRENCY
        await limits.release(ALICE, A, 7)
        assert await reserve(limits, self.BOUNDS, B) == ""


class TestRequests:
    async def test_so_many_in_a_minute_whether_they_run_or_not(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=3)
        assert [await reserve(limits, bounds, A), await reserve(limits, bounds, B, Demand(2, 1))] == ["", ""]
        for request in (A, B):
            await limits.release(ALICE, request, 0)
        assert await reserve(limits, bounds, C) == Limit.REQUESTS

    async def test_they_come_back_after_the_minute_and_not_before_it(self, harness: Harness) -> None:
        limits, bounds = harness.limits(SHORT_MINUTE), TenantLimits(requests_per_minute=1)
        assert await reserve(limits, bounds, A) == ""
        verdict = await limits.reserve(ALICE, bounds, B, ONE)
        assert verdict.refusal is not None
        assert verdict.refusal.wait_s is not None
        assert 0 < verdict.refusal.wait_s <= 0.61
        await harness.elapse(verdict.refusal.wait_s)
        assert await reserve(limits, bounds, B) == ""

    async def test_b106_a_refusal_by_another_limit_costs_nothing(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=2, tokens_per_minute=20, max_concurrent=1)
        assert await reserve(limits, bounds, A) == ""
        assert await reserve(limits, bounds, B) == Limit.CONCURRENCY
        await limits.release(ALICE, A, 10)
        assert await reserve(limits, bounds, B, Demand(1, 11)) == Limit.TOKENS
        assert await reserve(limits, bounds, C) == ""
        await limits.release(ALICE, C, 10)
        assert await reserve(limits, bounds, D, Demand(1, 0)) == Limit.REQUESTS

    async def test_who_was_not_served_gets_all_back(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=1, tokens_per_minute=10)
        assert await reserve(limits, bounds, A) == ""
        await limits.release(ALICE, A, None)
        assert await reserve(limits, bounds, B) == ""

    async def test_more_than_the_limit_at_once_never_fits(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=2)
        verdict = await limits.reserve(ALICE, bounds, A, Demand(3, 1))
        assert verdict.refusal is not None
        assert verdict.refusal.wait_s == pytest.approx(60.5, abs=0.6)


class TestTokens:
    BOUNDS = TenantLimits(tokens_per_minute=100)

    async def test_a_request_without_tokens_fits_though_more_was_used_than_allowed(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(tokens_per_minute=20)
        assert await reserve(limits, bounds, A) == ""
        await limits.release(ALICE, A, 50)
        assert await reserve(limits, bounds, B, Demand(1, 1)) == Limit.TOKENS
        assert await reserve(limits, bounds, C, Demand(1, 0)) == ""

    async def test_the_rest_of_the_estimate_comes_back(self, harness: Harness) -> None:
        limits = harness.limits()
        assert await reserve(limits, self.BOUNDS, A, Demand(1, 90)) == ""
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 11)) == Limit.TOKENS
        await limits.release(ALICE, A, 20)
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 81)) == Limit.TOKENS
        assert await reserve(limits, self.BOUNDS, C, Demand(1, 80)) == ""

    async def test_an_answer_longer_than_foreseen_is_charged_too(self, harness: Harness) -> None:
        limits = harness.limits()
        await reserve(limits, self.BOUNDS, A, Demand(1, 10))
        await limits.release(ALICE, A, 95)
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 6)) == Limit.TOKENS
        assert await reserve(limits, self.BOUNDS, C, Demand(1, 5)) == ""

    @pytest.mark.parametrize("settled", [30, 50, 70])
    async def test_settling_puts_the_real_prompt_in_place_of_the_estimate(self, harness: Harness, settled: int) -> None:
        limits = harness.limits()
        await reserve(limits, self.BOUNDS, A, Demand(1, 50))
        verdict = await limits.settle(ALICE, self.BOUNDS, A, settled)
        assert is_granted(verdict)
        assert verdict.quota.tokens is not None
        assert verdict.quota.tokens.remaining == 100 - settled
        await limits.release(ALICE, A, settled - 10)
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 111 - settled)) == Limit.TOKENS
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 110 - settled)) == ""

    async def test_a_prompt_that_settles_above_the_limit_is_refused_and_costs_nothing(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2)
        await reserve(limits, bounds, A, Demand(1, 60))
        await reserve(limits, bounds, B, Demand(1, 10))
        verdict = await limits.settle(ALICE, bounds, B, 41)
        assert verdict.refusal is not None
        assert verdict.refusal.limit == Limit.TOKENS
        await limits.release(ALICE, B, None)
        assert await reserve(limits, bounds, C, Demand(1, 40)) == ""

    async def test_settling_what_was_lost_is_no_refusal(self, harness: Harness) -> None:
        limits = harness.limits()
        assert is_granted(await limits.settle(ALICE, self.BOUNDS, A, 1000))
        assert await reserve(limits, self.BOUNDS, B, Demand(1, 100)) == ""


class TestQuota:
    async def test_it_says_what_is_left_and_when_all_of_it_is_back(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=5, tokens_per_minute=100)
        quota = (await limits.reserve(ALICE, bounds, A, Demand(2, 30))).quota
        assert quota.requests is not None
        assert quota.tokens is not None
        assert (quota.requests.limit, quota.requests.remaining) == (5, 3)
        assert (quota.tokens.limit, quota.tokens.remaining) == (100, 70)
        assert 59 <= quota.requests.reset_s <= 61.01
        assert 59 <= quota.tokens.reset_s <= 61.01

    async def test_a_refusal_says_it_too(self, harness: Harness) -> None:
        limits, bounds = harness.limits(), TenantLimits(requests_per_minute=1, tokens_per_minute=100)
        await limits.reserve(ALICE, bounds, A, ONE)
        quota = (await limits.reserve(ALICE, bounds, B, ONE)).quota
        assert quota.requests is not None
        assert quota.tokens is not None
        assert (quota.requests.remaining, quota.tokens.remaining) == (0, 90)

    async def test_what_has_no_limit_is_not_told(self, harness: Harness) -> None:
        quota = (await harness.limits().reserve(ALICE, TenantLimits(max_concurrent=1), A, ONE)).quota
        assert (quota.requests, quota.tokens) == (None, None)


@pytest.mark.parametrize(
    "bounds",
    [
        TenantLimits(requests_per_minute=37),
        TenantLimits(tokens_per_minute=370),
        TenantLimits(max_concurrent=37),
        TenantLimits(requests_per_minute=90, tokens_per_minute=379, max_concurrent=50),
    ],
    ids=["requests", "tokens", "concurrency", "all"],
)
async def test_gateways_that_hammer_together_let_in_exactly_the_limit(harness: Harness, bounds: TenantLimits) -> None:
    gateways = [harness.limits() for _ in range(4)]
    verdicts = await asyncio.gather(
        *(gateways[n % 4].reserve(ALICE, bounds, RequestId(f"r{n}"), ONE) for n in range(200))
    )
    assert sum(map(is_granted, verdicts)) == 37
