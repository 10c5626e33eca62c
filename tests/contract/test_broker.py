"""One suite for every broker: what the seams promise, in memory, over Redis and over Valkey."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext

import pytest

from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate, Placed, Waiting, Whereabouts
from common.errors import Overloaded, StalePlacement
from common.messages.ids import EntryId, Epoch, GatewayId, ModelName, PlacementNumber, RequestId, WorkerId
from common.messages.registry import Role, WorkerHealth
from tests.support.broker_harness import Broker, Harness, MemoryHarness, RedisHarness
from tests.support.broker_records import (
    FINGERPRINT,
    MODEL,
    make_card,
    make_job,
    make_task,
    worker_load,
    worker_record,
)
from tests.support.redis_server import RedisServer, running_redis

EPOCH = Epoch(1 << 62)
D0, D1, D2 = WorkerId("decode-0"), WorkerId("decode-1"), WorkerId("decode:2 {x}")
P0, P1 = (WorkerId("prefill-0"), Epoch(8)), (WorkerId("prefill-1"), Epoch(9))
BRIEF = BrokerPolicy(worker_ttl_s=0.5, gateway_ttl_s=0.4, model_ttl_s=0.5)
LONG_S = 30.0
"""Blocking reads in these tests are woken, never timed out."""


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        pytest.param("redis-server", marks=pytest.mark.redis),
        pytest.param("valkey-server", marks=pytest.mark.redis),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer | None]:
    with nullcontext() if request.param == "memory" else running_redis(request.param) as running:
        yield running


@pytest.fixture
async def harness(server: RedisServer | None) -> AsyncIterator[Harness]:
    if server is None:
        yield MemoryHarness()
        return
    over_redis = RedisHarness(server)
    await over_redis.connection.call("FLUSHALL")
    yield over_redis
    await over_redis.close()


@pytest.fixture
def broker(harness: Harness) -> Broker:
    return harness.broker()


def candidate(worker: WorkerId = D0, epoch: int = EPOCH, cost: float = 0.0) -> Candidate:
    return Candidate(worker, Epoch(epoch), cost)


async def place(
    broker: Broker, request: str, num_blocks: int = 10, *candidates: Candidate, placement: int = 1
) -> Placed | Waiting:
    return await broker.jobs.place(make_job(request, placement), num_blocks, candidates or (candidate(),))


async def read(broker: Broker, worker: WorkerId = D0, epoch: int = EPOCH, after: EntryId | None = None) -> list[str]:
    return [queued.job.request for queued in await broker.jobs.read(worker, Epoch(epoch), after, 0.0)]


async def last_entry(broker: Broker, worker: WorkerId = D0) -> EntryId:
    return (await broker.jobs.read(worker, EPOCH, None, 0.0))[-1].entry


async def where(broker: Broker, request: str, placement: int = 1) -> str:
    return await broker.jobs.whereabouts(RequestId(request), PlacementNumber(placement))


async def withdraw(broker: Broker, request: str, placement: int = 1) -> None:
    await broker.jobs.withdraw(RequestId(request), PlacementNumber(placement))


class TestRegistry:
    async def test_a_beat_registers(self, broker: Broker) -> None:
        record, load = worker_record(), worker_load(5, num_running=2)
        await broker.registry.beat(record, load)
        [state] = await broker.registry.workers()
        assert (state.record, state.load) == (record, load)
        assert 0 <= state.age_s < 20

    async def test_a_silent_worker_is_not_listed(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        await broker.registry.beat(worker_record(), worker_load())
        await harness.elapse(0.55)
        assert await broker.registry.workers() == []
        await broker.registry.beat(worker_record(), worker_load())
        assert len(await broker.registry.workers()) == 1

    async def test_the_age_grows_until_the_next_beat(self, harness: Harness) -> None:
        broker = harness.broker()
        await broker.registry.beat(worker_record(), worker_load())
        await harness.elapse(0.1)
        [state] = await broker.registry.workers()
        assert state.age_s >= 0.1

    async def test_leaving_is_for_the_own_epoch_only(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(epoch=2), worker_load())
        await broker.registry.leave(D0, Epoch(1))
        assert len(await broker.registry.workers()) == 1
        await broker.registry.leave(D0, Epoch(2))
        assert await broker.registry.workers() == []

    async def test_a_restarted_worker_takes_its_seat_and_keeps_it(self, broker: Broker) -> None:
        for epoch in (1, 2, 1):  # the first process was frozen and goes on beating
            await broker.registry.beat(worker_record(epoch=epoch), worker_load())
        [state] = await broker.registry.workers()
        assert state.record.epoch == 2

    async def test_a_loading_worker_is_visible_but_gets_no_job(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(health=WorkerHealth.LOADING))
        assert len(await broker.registry.workers()) == 1
        assert await place(broker, "a") == Waiting(0)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["a"]

    async def test_models_do_not_see_each_other(self, harness: Harness) -> None:
        one, other = harness.broker(ModelName("m")), harness.broker(ModelName("m}:workers"))
        await one.registry.beat(worker_record(), worker_load())
        assert await other.registry.workers() == []
        assert await other.index.models() == ["m"]

    async def test_the_index_knows_models_that_beat_lately(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        assert await broker.index.models() == []
        await broker.registry.beat(worker_record(), worker_load(health=WorkerHealth.LOADING))
        assert await broker.index.models() == [MODEL]
        await harness.elapse(0.55)
        assert await broker.index.models() == []

    async def test_the_card_is_the_last_one_published(self, broker: Broker) -> None:
        assert await broker.registry.card() is None
        await broker.registry.publish_card(make_card(created=1))
        await broker.registry.publish_card(make_card(created=2))
        assert await broker.registry.card() == make_card(created=2)


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
        both = candidate(D0), candidate(D1, cost=1.5)
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

    async def test_a_full_waiting_set_refuses(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(max_waiting=2, retry_after_s=3.5))
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


class TestWithdrawal:
    async def test_from_the_waiting_set(self, broker: Broker) -> None:
        await place(broker, "a")
        await place(broker, "b")
        await withdraw(broker, "a")
        assert await where(broker, "a") == Whereabouts.UNKNOWN
        assert await place(broker, "b") == Waiting(0)

    async def test_from_a_stream_frees_its_room_for_a_waiting_job(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(10))
        await place(broker, "a", 10)
        await place(broker, "b", 10)
        await withdraw(broker, "a")
        assert await read(broker) == ["b"]

    async def test_of_older_placements_too(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(10))
        await place(broker, "a", 10)
        await withdraw(broker, "a", 3)
        assert await read(broker) == []

    async def test_leaves_newer_placements_alone(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a", placement=2)
        await withdraw(broker, "a", 1)
        assert await read(broker) == ["a"]
        assert await where(broker, "a", 2) == Whereabouts.PLACED

    async def test_before_the_job_arrives(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await withdraw(broker, "a", 2)
        for placement in (1, 2):
            with pytest.raises(StalePlacement):
                await place(broker, "a", placement=placement)
        assert await read(broker) == []
        assert await place(broker, "a", placement=3) == Placed(D0, EPOCH)

    async def test_twice_and_after_absorption(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        await broker.registry.beat(worker_record(), worker_load(absorbed=await last_entry(broker)))
        await withdraw(broker, "a")
        await withdraw(broker, "a")
        assert await where(broker, "a") == Whereabouts.UNKNOWN

    async def test_is_forgotten_after_the_record_ttl(self, harness: Harness) -> None:
        broker = harness.broker(policy=BrokerPolicy(record_ttl_s=0.1))
        await broker.registry.beat(worker_record(), worker_load())
        await withdraw(broker, "a")
        await harness.elapse(0.15)
        assert await place(broker, "a") == Placed(D0, EPOCH)


class TestWhereabouts:
    async def test_follow_the_job(self, broker: Broker) -> None:
        assert await where(broker, "a") == Whereabouts.UNKNOWN
        await place(broker, "a")
        assert await where(broker, "a") == Whereabouts.WAITING
        assert await where(broker, "a", 2) == Whereabouts.UNKNOWN
        await broker.registry.beat(worker_record(), worker_load())
        assert await where(broker, "a") == Whereabouts.PLACED
        await broker.registry.beat(worker_record(), worker_load(absorbed=await last_entry(broker)))
        assert await where(broker, "a") == Whereabouts.UNKNOWN

    async def test_a_job_of_a_dead_worker_is_lost(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        await harness.elapse(0.55)
        assert await where(broker, "a") == Whereabouts.UNKNOWN

    async def test_a_job_of_a_worker_that_left_is_lost(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        await broker.registry.leave(D0, EPOCH)
        assert await where(broker, "a") == Whereabouts.UNKNOWN


class TestReading:
    async def test_a_blocked_reader_wakes_with_the_job(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        reader = asyncio.create_task(broker.jobs.read(D0, EPOCH, None, LONG_S))
        await asyncio.sleep(0)  # let it begin
        await place(broker, "a")
        [queued] = await asyncio.wait_for(reader, LONG_S / 2)
        assert queued.job == make_job("a")

    async def test_reading_goes_on_behind_the_last_entry(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        after = await last_entry(broker)
        await place(broker, "b")
        assert await read(broker, after=after) == ["b"]

    async def test_nothing_comes_in_time(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await place(broker, "a")
        assert await broker.jobs.read(D0, EPOCH, await last_entry(broker), 0.01) == []

    async def test_a_job_is_read_as_it_was_placed(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        job = make_job("a", prompt=bytes(range(256)) * 16)
        await broker.jobs.place(job, 1, [candidate()])
        [queued] = await broker.jobs.read(D0, EPOCH, None, 0.0)
        assert queued.job == job

    async def test_new_entries_come_behind_those_read_before_everything_was_lost(self, broker: Broker) -> None:
        far_ahead = EntryId("99999999999999-3")  # the Redis of before had a faster clock
        await broker.registry.beat(worker_record(), worker_load(absorbed=far_ahead))
        await place(broker, "a")
        assert await read(broker, after=far_ahead) == ["a"]
        await broker.registry.beat(worker_record(), worker_load(absorbed=far_ahead))
        assert await read(broker, after=far_ahead) == ["a"]


class TestTasks:
    async def test_a_task_is_claimed_once_and_stays_until_its_author_deletes_it(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        entry = await tasks.publish(make_task("a"))
        delivery = await tasks.claim(*P0, 0.0)
        assert delivery is not None
        assert (delivery.entry, delivery.task) == (entry, make_task("a"))
        assert await tasks.claim(*P1, 0.0) is None
        assert await tasks.num_tasks() == 1
        await tasks.delete(entry)
        await tasks.delete(entry)
        assert await tasks.num_tasks() == 0
        assert await tasks.abandoned(*P1, 0.0) == []

    async def test_tasks_are_claimed_oldest_first(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        for request in "abc":
            await tasks.publish(make_task(request))
        claimed = [await tasks.claim(*consumer, 0.0) for consumer in (P0, P1, P0)]
        assert [delivery.task.request for delivery in claimed if delivery] == ["a", "b", "c"]

    async def test_a_newer_try_replaces_the_older_one(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        first = await tasks.publish(make_task("a", 1))
        assert await tasks.claim(*P0, 0.0) is not None
        await tasks.publish(make_task("a", 2), replaces=first)
        assert await tasks.num_tasks() == 1
        delivery = await tasks.claim(*P1, 0.0)
        assert delivery is not None
        assert delivery.task.try_number == 2
        assert [delivery.task.try_number for delivery in await tasks.abandoned(*P1, 0.0)] == [2]

    async def test_a_blocked_claimer_wakes_with_the_task(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        claimer = asyncio.create_task(tasks.claim(*P0, LONG_S))
        await asyncio.sleep(0)  # let it begin
        await tasks.publish(make_task("a"))
        delivery = await asyncio.wait_for(claimer, LONG_S / 2)
        assert delivery is not None
        assert delivery.task.request == "a"

    async def test_each_task_wakes_one_claimer(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        claimers = [asyncio.create_task(tasks.claim(*consumer, LONG_S)) for consumer in (P0, P1)]
        await asyncio.sleep(0)  # let them begin
        for request in "ab":
            await tasks.publish(make_task(request))
        deliveries = await asyncio.wait_for(asyncio.gather(*claimers), LONG_S / 2)
        assert sorted(delivery.task.request for delivery in deliveries if delivery) == ["a", "b"]

    async def test_nothing_comes_in_time(self, broker: Broker) -> None:
        assert await broker.tasks(FINGERPRINT).claim(*P0, 0.01) is None

    async def test_tasks_of_a_dead_claimer_are_taken_over(self, harness: Harness) -> None:
        tasks = harness.broker().tasks(FINGERPRINT)
        for number in range(40):  # more than one page
            await tasks.publish(make_task(f"r{number}"))
            await tasks.claim(*P0, 0.0)
        assert await tasks.abandoned(*P1, 60.0) == []
        await harness.elapse(0.1)
        taken = await tasks.abandoned(*P1, 0.05)
        assert [delivery.task.request for delivery in taken] == [f"r{number}" for number in range(40)]
        assert await tasks.abandoned(*P0, 60.0) == []

    async def test_unclaimed_tasks_are_not_abandoned(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        await tasks.publish(make_task("a"))
        assert await tasks.abandoned(*P0, 0.0) == []

    async def test_a_task_that_kills_its_workers_is_dropped(self, harness: Harness) -> None:
        tasks = harness.broker(policy=BrokerPolicy(max_deliveries=3)).tasks(FINGERPRINT)
        await tasks.publish(make_task("poison"))
        await tasks.claim(*P0, 0.0)
        await tasks.publish(make_task("good"))
        taken = [[delivery.task.request for delivery in await tasks.abandoned(*P1, 0.0)] for _ in range(3)]
        assert taken == [["poison"], ["poison"], []]
        assert await tasks.num_tasks() == 1
        delivery = await tasks.claim(*P1, 0.0)
        assert delivery is not None
        assert delivery.task.request == "good"

    async def test_fingerprints_do_not_mix(self, broker: Broker) -> None:
        await broker.tasks(FINGERPRINT).publish(make_task("a"))
        other = broker.tasks(type(FINGERPRINT)("beef"))
        assert await other.claim(*P0, 0.0) is None
        assert await other.num_tasks() == 0
