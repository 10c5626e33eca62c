"""Which worker every broker gives a job to, and which jobs wait."""

import asyncio

import pytest

from common.broker.policy import BrokerPolicy
from common.broker.protocols import Placed, Waiting, Whereabouts
from common.errors import Overloaded, StalePlacement
from common.messages.ids import GatewayId
from common.messages.registry import Role, WorkerHealth
from tests.support.broker_calls import candidate, last_entry, place, read, where, withdraw
from tests.support.broker_harness import BRIEF, LONG_S, Broker, Harness
from tests.support.broker_records import D0, D1, D2, EPOCH, make_job, worker_load, worker_record


class TestPlacement:
    async def test_the_cheapest_candidate_gets_the_job(self, broker: Broker) -> None:
        for name in (D0, D1, D2):
            await broker.registry.beat(worker_record(name), worker_load())
        costs = candidate(D0, cost=40.5), candidate(D1, cost=40.25), candidate(D2, cost=50)
        assert await place(broker, "a", 10, *costs) == Placed(D1, EPOCH)
        assert await read(broker, D1) == ["a"]
        assert await read(broker, D0) == []

    async def test_load_counts_as_cost(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(D0), worker_load(num_running=3))
        await broker.registry.beat(worker_record(D1), worker_load())
        both = candidate(D0), candidate(D1, cost=40)  # a sequence at work weighs 64, the jobs have 16 tokens
        placed = [await place(broker, request, 10, *both) for request in "abcd"]
        assert placed == [Placed(D1, EPOCH), Placed(D1, EPOCH), Placed(D0, EPOCH), Placed(D1, EPOCH)]

    async def test_a_worker_named_with_odd_characters_is_served(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(D2), worker_load())
        assert await place(broker, "a", 10, candidate(D2)) == Placed(D2, EPOCH)
        assert await read(broker, D2) == ["a"]

    async def test_entries_in_the_stream_reserve_blocks(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(25))
        placed = [await place(broker, request, 10) for request in "abc"]
        assert placed == [Placed(D0, EPOCH), Placed(D0, EPOCH), Waiting(0)]

    async def test_entries_in_the_stream_take_seats(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(max_sequences=3), worker_load(num_running=1))
        placed = [await place(broker, request, 1) for request in "abc"]
        assert placed == [Placed(D0, EPOCH), Placed(D0, EPOCH), Waiting(0)]

    async def test_a_beat_ends_the_reservations_it_accounts_for(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(20))
        await place(broker, "a", 10)
        absorbed = await last_entry(broker)
        await place(broker, "b", 10)
        await broker.registry.beat(worker_record(), worker_load(10, num_running=1, absorbed=absorbed))
        assert await read(broker) == ["b"]
        assert await place(broker, "c", 1) == Waiting(0)  # 10 free, 10 reserved by b
        await broker.registry.beat(worker_record(), worker_load(20, absorbed=absorbed))  # a is finished
        assert await read(broker) == ["b", "c"]

    async def test_a_beat_overtaken_on_its_way_changes_no_figures(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(20))
        await place(broker, "a", 10)
        first = await last_entry(broker)
        await place(broker, "b", 10)
        second = await last_entry(broker)
        await broker.registry.beat(worker_record(), worker_load(0, absorbed=second))
        await broker.registry.beat(worker_record(), worker_load(10, absorbed=first))
        assert await place(broker, "c", 10) == Waiting(0)

    @pytest.mark.parametrize(
        ("role", "health"),
        [
            (Role.PREFILL, WorkerHealth.READY),
            (Role.DECODE, WorkerHealth.LOADING),
            (Role.DECODE, WorkerHealth.DRAINING),
        ],
    )
    async def test_only_ready_decode_workers_get_jobs(self, broker: Broker, role: Role, health: WorkerHealth) -> None:
        await broker.registry.beat(worker_record(role=role), worker_load(health=health))
        assert await place(broker, "a") == Waiting(0)

    async def test_another_epoch_of_the_worker_gets_no_job(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(epoch=EPOCH), worker_load())
        assert await place(broker, "a", 10, candidate(epoch=EPOCH - 1)) == Waiting(0)  # differs beyond 53 bits

    async def test_a_dead_worker_gets_no_job(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        await broker.registry.beat(worker_record(), worker_load())
        await harness.elapse(0.55)
        assert await place(broker, "a") == Waiting(0)

    async def test_an_unread_job_dies_with_its_incarnation(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        await broker.registry.beat(worker_record(epoch=2), worker_load())
        assert await read(broker, epoch=2) == []
        assert await where(broker, "a") == Whereabouts.UNKNOWN

    async def test_repeating_a_placed_job_changes_nothing(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(D0), worker_load())
        await broker.registry.beat(worker_record(D1), worker_load())
        assert await place(broker, "a", 10, candidate(D0)) == Placed(D0, EPOCH)
        assert await place(broker, "a", 10, candidate(D1)) == Placed(D0, EPOCH)
        assert await read(broker, D0) == ["a"]
        assert await read(broker, D1) == []

    async def test_repeating_an_absorbed_job_changes_nothing(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        await broker.registry.beat(worker_record(), worker_load(absorbed=await last_entry(broker)))
        assert await place(broker, "a") == Placed(D0, EPOCH)
        assert await read(broker) == []

    async def test_a_higher_placement_removes_the_older_one_from_another_stream(self, broker: Broker) -> None:
        for name in (D0, D1):
            await broker.registry.beat(worker_record(name), worker_load(10))
        await place(broker, "a", 10, candidate(D0))
        assert await place(broker, "a", 10, candidate(D1), placement=2) == Placed(D1, EPOCH)
        assert await read(broker, D0) == []
        assert await read(broker, D1) == ["a"]
        assert await place(broker, "b", 10, candidate(D0)) == Placed(D0, EPOCH)  # its blocks are free again

    async def test_a_higher_placement_reuses_the_room_of_the_older_one(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(10))
        await place(broker, "a", 10)
        assert await place(broker, "a", 10, placement=2) == Placed(D0, EPOCH)
        [queued] = await broker.jobs.read(D0, EPOCH, None, 0.0)
        assert queued.job.placement == 2

    async def test_a_lower_placement_is_stale(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a", placement=2)
        with pytest.raises(StalePlacement):
            await place(broker, "a", placement=1)
        assert await read(broker) == ["a"]

    async def test_a_place_without_candidates_waits(self, broker: Broker) -> None:
        assert await broker.jobs.place(make_job("a"), 1, ()) == Waiting(0)


class TestWaiting:
    async def test_waiting_jobs_go_in_order_of_arrival(self, broker: Broker) -> None:
        assert [await place(broker, request) for request in "cab"] == [Waiting(0), Waiting(1), Waiting(2)]
        await broker.registry.beat(worker_record(), worker_load(25))
        assert await read(broker) == ["c", "a"]
        assert await place(broker, "b") == Waiting(0)
        await broker.registry.beat(worker_record(), worker_load(10, absorbed=await last_entry(broker)))
        assert await read(broker) == ["b"]

    async def test_a_small_job_does_not_overtake_a_big_one(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(50))
        assert await place(broker, "big", 60) == Waiting(0)
        assert await place(broker, "small", 1) == Waiting(1)
        await broker.registry.beat(worker_record(), worker_load(59))
        assert await read(broker) == []
        await broker.registry.beat(worker_record(), worker_load(61))
        assert await read(broker) == ["big", "small"]

    async def test_a_job_does_not_block_a_worker_that_could_never_hold_it(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(D0, num_blocks=1000), worker_load(0))
        await broker.registry.beat(worker_record(D1, num_blocks=100), worker_load(100))
        both = candidate(D0), candidate(D1)
        assert await place(broker, "big", 500, *both) == Waiting(0)
        assert await place(broker, "small", 1, *both) == Placed(D1, EPOCH)

    async def test_a_newcomer_lets_waiting_jobs_go_first(self, broker: Broker) -> None:
        assert await place(broker, "a", 10, candidate(D1)) == Waiting(0)  # its candidate is gone
        await broker.registry.beat(worker_record(D0), worker_load(5))
        await broker.registry.beat(worker_record(D1), worker_load(15))
        assert await read(broker, D1) == ["a"]
        assert await place(broker, "b", 10, candidate(D0), candidate(D1)) == Waiting(0)
        await withdraw(broker, "a")
        assert await read(broker, D1) == ["b"]

    async def test_a_newcomer_brings_no_room_for_itself_alone(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(10))
        assert await broker.jobs.place(make_job("a"), 10, ()) == Waiting(0)  # nobody was proposed
        assert await place(broker, "b") == Waiting(0)
        assert await read(broker) == ["a"]

    async def test_a_full_waiting_set_refuses(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(max_waiting_requests=2, retry_after_s=3.5))
        await place(broker, "a")
        await place(broker, "b")
        with pytest.raises(Overloaded) as refusal:
            await place(broker, "c")
        assert refusal.value.retry_after_s == 3.5
        assert await where(broker, "c") == Whereabouts.UNKNOWN
        assert await place(broker, "b") == Waiting(1)  # a repetition is no newcomer
        assert await place(broker, "b", placement=2) == Waiting(1)
        await withdraw(broker, "a")
        assert await place(broker, "c") == Waiting(1)

    async def test_a_later_placement_keeps_its_age(self, broker: Broker) -> None:
        for request in "ab":
            await place(broker, request)
        assert await place(broker, "a", placement=2) == Waiting(0)
        await broker.registry.beat(worker_record(), worker_load(10))
        [queued] = await broker.jobs.read(D0, EPOCH, None, 0.0)
        assert (queued.job.request, queued.job.placement) == ("a", 2)

    async def test_waiting_jobs_vanish_with_their_gateway(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        dead, alive = GatewayId("gateway-dead"), GatewayId("gateway-alive")
        await broker.jobs.place(make_job("a", gateway=dead), 10, ())
        await broker.jobs.place(make_job("b", gateway=alive), 10, ())
        async with asyncio.timeout(LONG_S):
            while await where(broker, "a") == Whereabouts.WAITING:
                await broker.jobs.beat_gateway(alive)  # closer than half a lease: Redis was never away
                await broker.registry.beat(worker_record(), worker_load(0))
                await harness.elapse(0.05)
        assert await where(broker, "b") == Whereabouts.WAITING
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["b"]

    async def test_nothing_vanishes_because_redis_was_away(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        await broker.registry.beat(worker_record(), worker_load(0))
        await place(broker, "a")
        await harness.elapse(0.6)  # nobody could beat, and the worker is back first
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["a"]

    async def test_more_waiting_jobs_than_one_call_looks_at(self, broker: Broker) -> None:
        requests = [f"r{number:03}" for number in range(130)]
        for request in requests:
            await place(broker, request, 0)
        record = worker_record(max_sequences=1000)
        await broker.registry.beat(record, worker_load())  # moves 64 of them
        assert await place(broker, "newcomer", 0) == Waiting(2)  # 64 more went first, two are still before it
        await broker.registry.beat(record, worker_load())
        order: list[str] = []
        after = None
        while jobs := await broker.jobs.read(D0, EPOCH, after, 0.0):
            order += [queued.job.request for queued in jobs]
            after = jobs[-1].entry
        assert order == [*requests, "newcomer"]


class TestDeadlines:
    """Waiting jobs are dropped at their deadline, counted by the broker's own clock."""

    async def test_a_waiting_job_is_given_to_nobody_after_its_deadline(self, harness: Harness) -> None:
        broker = harness.broker()
        await broker.jobs.place(make_job("brief", time_left_s=0.2), 10, ())
        await broker.jobs.place(make_job("long", time_left_s=600.0), 10, ())
        await broker.jobs.place(make_job("endless"), 10, ())
        await harness.elapse(0.25)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["long", "endless"]
        assert await where(broker, "brief") == Whereabouts.UNKNOWN

    async def test_before_its_deadline_it_is(self, harness: Harness) -> None:
        broker = harness.broker()
        await broker.jobs.place(make_job("a", time_left_s=LONG_S), 10, ())
        await harness.elapse(0.05)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["a"]

    async def test_an_expired_job_makes_room_in_the_waiting_set(self, harness: Harness) -> None:
        """Also behind one that still waits, which nobody can take now."""
        broker = harness.broker(policy=BrokerPolicy(max_waiting_requests=3))
        for request, time_left_s in (("a", None), ("b", 0.2), ("c", 0.2)):
            await broker.jobs.place(make_job(request, time_left_s=time_left_s), 10, ())
        with pytest.raises(Overloaded):
            await broker.jobs.place(make_job("d"), 10, ())
        await harness.elapse(0.25)
        assert await broker.jobs.place(make_job("d"), 10, ()) == Waiting(1)

    async def test_a_later_placement_brings_its_own_deadline(self, harness: Harness) -> None:
        broker = harness.broker()
        await broker.jobs.place(make_job("a", time_left_s=0.2), 10, ())
        assert await broker.jobs.place(make_job("a", 2, time_left_s=600.0), 10, ()) == Waiting(0)
        await harness.elapse(0.25)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["a"]

    async def test_a_deadline_outlasts_the_records_of_other_jobs(self, harness: Harness) -> None:
        """A job that waits for longer than records are kept is dropped at its deadline, not before and not never."""
        broker = harness.broker(policy=BrokerPolicy(record_ttl_s=0.2))
        gateway = GatewayId("gateway-0")
        await broker.jobs.place(make_job("a", time_left_s=0.6), 10, ())
        await harness.elapse(0.3)
        await broker.jobs.beat_gateway(gateway)
        assert await where(broker, "a") == Whereabouts.WAITING
        await harness.elapse(0.35)
        await broker.jobs.beat_gateway(gateway)
        assert await where(broker, "a") == Whereabouts.UNKNOWN

    async def test_no_time_left_is_an_answer_too(self, broker: Broker) -> None:
        assert await broker.jobs.place(make_job("a"), 10, ()) == Waiting(0)
        assert await broker.jobs.place(make_job("a", 2, time_left_s=0.0), 10, ()) == Waiting(0)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == []
