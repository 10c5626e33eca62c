"""Which waiting job every broker gives away next: priority, fair shares of tenants, age; and who must not wait."""

import asyncio
import dataclasses
from collections.abc import Sequence

import msgspec
import pytest

from common.broker.policy import BrokerPolicy
from common.broker.protocols import Placed, Waiting
from common.errors import Overloaded
from common.messages.ids import ChoiceIndex, Fingerprint, GatewayId, TenantId
from common.messages.job import Job, OpenChoice
from tests.support.broker_calls import ONLY_D0, last_entry, place, read, withdraw
from tests.support.broker_harness import Broker, Harness
from tests.support.broker_records import D0, D1, EPOCH, make_job, worker_load, worker_record

GATEWAY = GatewayId("gateway-0")
MEASURED = BrokerPolicy(rate_known_after_s=0.2, rate_known_after_jobs=2)


def job(
    request: str,
    placement: int = 1,
    *,
    tenant: str = "",
    priority: int = 0,
    cost: int = 100,
    num_choices: int = 1,
    fingerprint: str | None = None,
    time_left_s: float | None = None,
    age_s: float = 0.0,
) -> Job:
    """Return a job with what orders it."""
    return msgspec.structs.replace(
        make_job(request, placement, time_left_s=time_left_s),
        tenant=TenantId(tenant),
        priority=priority,
        cost=cost,
        choices=tuple(OpenChoice(ChoiceIndex(index)) for index in range(num_choices)),
        fingerprint=None if fingerprint is None else Fingerprint(fingerprint),
        age_s=age_s,
    )


async def park(broker: Broker, *jobs: Job) -> None:
    """Let jobs wait."""
    for waiting in jobs:
        assert isinstance(await broker.jobs.place(waiting, 10, ()), Waiting)


async def drained(broker: Broker, num_jobs: int, *, is_behind_others: bool = False) -> str:
    """Return the initials of so many jobs, in the order in which a worker with one seat gets them."""
    order, absorbed = "", await last_entry(broker) if is_behind_others else None
    for _ in range(num_jobs):
        await broker.registry.beat(worker_record(max_sequences=1), worker_load(absorbed=absorbed))
        [request] = await read(broker, after=absorbed)
        order += request[0]
        absorbed = await last_entry(broker)
    return order


def numbered(tenant: str, count: int, cost: int = 100, weight: float = 1.0) -> Sequence[Job]:
    """Return jobs of one tenant."""
    jobs = [job(f"{tenant}{number}", tenant=tenant, cost=cost) for number in range(count)]
    return [msgspec.structs.replace(each, weight=weight) for each in jobs]


class TestPriority:
    async def test_the_more_urgent_job_goes_first(self, broker: Broker) -> None:
        await park(broker, job("low", priority=-1), job("normal"), job("high", priority=1), job("top", priority=99))
        assert await drained(broker, 4) == "thnl"

    async def test_a_newcomer_that_precedes_those_who_wait_gets_the_room(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=1), worker_load())
        await park(broker, job("low"))  # nobody was proposed
        assert await broker.jobs.place(job("high", priority=1), 10, ONLY_D0) == Placed(D0, EPOCH)
        assert await read(broker) == ["high"]

    async def test_waiting_makes_urgent(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(ageing_s=0.1))
        await park(broker, job("old"))
        await harness.elapse(0.35)
        await park(broker, job("new", priority=2), job("top", priority=9))
        assert await drained(broker, 3) == "ton"

    async def test_a_request_says_how_old_it_is(self, broker: Broker) -> None:
        await park(broker, job("new"), job("old", age_s=5.0), job("ancient", age_s=1e5), job("urgent", priority=1))
        assert await drained(broker, 4) == "auon"


class TestFairness:
    async def test_a_tenant_with_many_jobs_waits_for_one_with_few(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 4), *numbered("b", 2))
        assert await drained(broker, 6) == "ababaa"

    async def test_shares_count_tokens(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 3, cost=400), *numbered("b", 9, cost=100))
        assert await drained(broker, 12) == "abbbbabbbbab"

    async def test_who_has_twice_the_weight_gets_twice_the_share(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 6, weight=2.0), *numbered("b", 3))
        assert await drained(broker, 9) == "abaabaaba"

    async def test_corrections_count_by_weight_too(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 3, weight=2.0), *numbered("b", 3))
        assert await drained(broker, 2) == "ab"
        await broker.jobs.beat_gateway(GATEWAY, {TenantId("a"): 300})
        assert await drained(broker, 3, is_behind_others=True) == "bab"

    async def test_nobody_saves_up_turns(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=100, num_blocks=9999), worker_load(9999))
        for served in numbered("b", 20):
            assert await broker.jobs.place(served, 10, ONLY_D0) == Placed(D0, EPOCH)
        await park(broker, *numbered("a", 3), *(job(f"b-{number}", tenant="b") for number in range(3)))
        # Whoever was placed last is behind by that job, and not by all that it was served while it was alone.
        assert await drained(broker, 6, is_behind_others=True) == "aababb"

    async def test_equals_go_by_age(self, broker: Broker) -> None:
        await park(broker, *(job(tenant, tenant=tenant) for tenant in "dbac"))
        assert await drained(broker, 4) == "dbac"

    async def test_what_was_charged_wrongly_is_corrected(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 3), *numbered("b", 3))
        assert await drained(broker, 2) == "ab"
        await broker.jobs.beat_gateway(GATEWAY, {TenantId("a"): 150, TenantId("b"): -50})
        assert await drained(broker, 4, is_behind_others=True) == "bbaa"

    async def test_who_leaves_the_waiting_set_unserved_pays_nothing(self, broker: Broker) -> None:
        await park(broker, *numbered("a", 4), *numbered("b", 3))
        for number in range(3):
            await withdraw(broker, f"a{number}")
        assert await drained(broker, 4) in ("abbb", "babb")

    async def test_a_tenant_of_any_name_is_served(self, broker: Broker) -> None:
        names = ["", ":", "!", "all", "10:x", "a:b", "ü\n", "{}"]
        await park(broker, *(job(str(index), tenant=name) for index, name in enumerate(names)))
        assert await drained(broker, len(names)) == "01234567"


class TestFailover:
    async def test_who_was_served_before_goes_first_and_pays_nothing(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=1), worker_load())
        assert await broker.jobs.place(job("again", tenant="a"), 10, ONLY_D0) == Placed(D0, EPOCH)
        await broker.registry.leave(D0, EPOCH)  # its worker dies
        await park(broker, *numbered("b", 3), *numbered("a", 2), job("x", tenant="c"))
        await park(broker, job("again", 2, tenant="a", cost=5000))
        assert await drained(broker, 7) == "abxbaba"

    async def test_among_them_the_older_request_goes_first(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=2), worker_load())
        for request in ("old", "young"):
            await broker.jobs.place(job(request), 10, ONLY_D0)
        await broker.registry.leave(D0, EPOCH)
        await park(broker, job("young", 2), job("old", 2))
        assert await drained(broker, 2) == "oy"

    async def test_a_placement_that_was_withdrawn_keeps_age_and_payment(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=1), worker_load())
        await broker.jobs.place(job("served"), 10, ONLY_D0)
        await park(broker, job("waits"), job("other"))
        await broker.registry.leave(D0, EPOCH)
        for request in ("waits", "served"):
            await withdraw(broker, request)
        await park(broker, job("new"), job("waits", 2), job("served", 2))
        assert await drained(broker, 4) == "swon"

    async def test_it_may_wait_where_others_are_refused(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(max_waiting_requests=1))
        await broker.registry.beat(worker_record(max_sequences=1), worker_load())
        await broker.jobs.place(job("a"), 10, ONLY_D0)
        await park(broker, job("b"))
        with pytest.raises(Overloaded):
            await broker.jobs.place(job("c"), 10, ())
        assert await broker.jobs.place(job("a", 2), 10, ()) == Waiting(0)

    async def test_one_whose_record_is_forgotten_counts_as_served(self, broker: Broker) -> None:
        await park(broker, job("new"), job("again", 2))
        assert await drained(broker, 2) == "an"


class TestRoom:
    async def test_every_choice_takes_a_seat(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=5), worker_load())
        placed = [await broker.jobs.place(job(name, num_choices=2), 10, ONLY_D0) for name in "abc"]
        assert placed == [Placed(D0, EPOCH), Placed(D0, EPOCH), Waiting(0)]
        await withdraw(broker, "a")
        assert await read(broker) == ["b", "c"]

    async def test_more_choices_than_any_seats_block_nobody(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=4), worker_load())
        assert await broker.jobs.place(job("many", num_choices=5), 10, ONLY_D0) == Waiting(0)
        assert await broker.jobs.place(job("one"), 10, ONLY_D0) == Placed(D0, EPOCH)

    async def test_a_job_goes_to_its_version_of_the_model_and_blocks_no_other(self, broker: Broker) -> None:
        new = msgspec.structs.replace(worker_record(D1), fingerprint=Fingerprint("new"))
        await park(broker, job("old", fingerprint="f00d"), job("any"))
        await broker.registry.beat(new, worker_load())
        assert await read(broker, D1) == ["any"]
        await broker.registry.beat(worker_record(D0), worker_load())
        assert await read(broker, D0) == ["old"]


class TestBounds:
    async def test_tokens_are_bounded_as_well_as_requests(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(max_waiting_tokens=250))
        await park(broker, job("huge", cost=1000))  # one may wait, whatever it costs
        with pytest.raises(Overloaded):
            await broker.jobs.place(job("a"), 10, ())
        await withdraw(broker, "huge")
        await park(broker, job("a"), job("b"))
        with pytest.raises(Overloaded):
            await broker.jobs.place(job("c"), 10, ())
        await park(broker, job("d", cost=50))

    async def test_a_gateway_hears_what_waits(self, broker: Broker) -> None:
        await park(broker, job("a", cost=70), job("b", cost=30))
        pressure = await broker.jobs.beat_gateway(GATEWAY)
        assert (pressure.num_requests, pressure.num_tokens, pressure.tokens_per_s) == (2, 100, None)
        assert pressure.wait_s is None
        await withdraw(broker, "a")
        await withdraw(broker, "b")
        assert (await broker.jobs.beat_gateway(GATEWAY)).num_tokens == 0


class TestRate:
    """How fast the waiting set empties tells who would come too late, and when to come again."""

    async def measured(self, harness: Harness, policy: BrokerPolicy = MEASURED) -> Broker:
        """Return a broker over which 1000 tokens per second at most went to workers, and a job of 1000 waits."""
        broker = harness.broker(policy=policy)
        await park(broker, *(job(str(number)) for number in range(4)), job("last", cost=10_000))
        await harness.elapse(0.4)
        await broker.registry.beat(worker_record(max_sequences=4), worker_load())
        assert len(await read(broker)) == 4
        return broker

    async def test_it_is_measured_while_somebody_waits(self, harness: Harness) -> None:
        broker = await self.measured(harness)
        pressure = await broker.jobs.beat_gateway(GATEWAY)
        assert pressure.tokens_per_s is not None
        assert 10 < pressure.tokens_per_s < 1001
        assert pressure.wait_s == pytest.approx(10_000 / pressure.tokens_per_s)

    async def test_who_cannot_be_served_in_time_is_refused_at_once(self, harness: Harness) -> None:
        broker = await self.measured(harness)
        with pytest.raises(Overloaded, match="begun in its time") as refusal:
            await broker.jobs.place(job("hopeless", time_left_s=2.0), 10, ())
        assert 1.0 <= refusal.value.retry_after_s <= 60.0
        await park(broker, job("patient", time_left_s=3600.0), job("endless"))
        await park(broker, job("urgent", time_left_s=2.0, priority=1), job("other", time_left_s=2.0, tenant="b"))

    async def test_who_would_wait_too_long_is_refused_at_once(self, harness: Harness) -> None:
        broker = await self.measured(harness, dataclasses.replace(MEASURED, max_queue_s=4.0))
        with pytest.raises(Overloaded, match="begun in its time") as refusal:
            await broker.jobs.place(job("hopeless"), 10, ())
        assert 6.0 <= refusal.value.retry_after_s <= 60.0
        await park(broker, job("urgent", priority=1), job("other", tenant="b"))
        await park(broker, job("served before", placement=2))

    async def test_the_last_quarter_is_for_errors_of_foreseeing(self, harness: Harness) -> None:
        broker = await self.measured(harness, dataclasses.replace(MEASURED, max_queue_s=13.0))
        with pytest.raises(Overloaded, match="begun in its time"):  # in ten seconds at the earliest
            await broker.jobs.place(job("hopeless"), 10, ())

    async def test_while_nobody_knows_the_rate_as_many_wait_as_are_served(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(max_queue_s=4.0))
        await broker.registry.beat(worker_record(max_sequences=2), worker_load())
        for number in range(4):
            await broker.jobs.place(job(str(number)), 10, ONLY_D0)
        with pytest.raises(Overloaded):
            await broker.jobs.place(job("one too many"), 10, ONLY_D0)
        await park(broker, job("of nobody in sight"))

    async def test_the_refused_hear_when_to_come_again(self, harness: Harness) -> None:
        broker = await self.measured(harness, dataclasses.replace(MEASURED, max_waiting_tokens=10_400))
        with pytest.raises(Overloaded) as refusal:
            await broker.jobs.place(job("a", cost=1000), 10, ())
        assert 9.0 < refusal.value.retry_after_s <= 60.0

    async def test_nobody_is_refused_for_a_rate_that_nobody_knows(self, harness: Harness) -> None:
        broker = harness.broker()
        await park(broker, job("first", cost=10**6), job("second", time_left_s=2.0))


async def test_many_at_once_are_served_once_each(broker: Broker) -> None:
    jobs = [job(f"{tenant}{number}", tenant=tenant, priority=number % 3) for tenant in "abc" for number in range(10)]
    await asyncio.gather(*(broker.jobs.place(one, 10, ()) for one in jobs))
    await broker.registry.beat(worker_record(max_sequences=1000, num_blocks=9999), worker_load(9999))
    served = await read(broker)
    assert sorted(served) == sorted(one.request for one in jobs)
    assert await place(broker, "next", 1) == Placed(D0, EPOCH)
