"""What every broker promises about a placed job: withdrawing it, finding it, reading it."""

import asyncio

import pytest

from common.broker.policy import BrokerPolicy
from common.broker.protocols import Placed, Waiting, Whereabouts
from common.errors import StalePlacement
from common.messages.ids import EntryId
from tests.support.broker_calls import candidate, last_entry, place, read, where, withdraw
from tests.support.broker_harness import BRIEF, LONG_S, Broker, Harness
from tests.support.broker_records import D0, EPOCH, make_job, worker_load, worker_record


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
