"""What every broker promises about prefill tasks."""

import asyncio

from common.broker.policy import BrokerPolicy
from common.messages.ids import EntryId
from tests.support.broker_harness import LONG_S, Broker, Harness
from tests.support.broker_records import FINGERPRINT, P0, P1, make_task


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

    async def test_who_has_claimed_a_task_is_known_until_it_is_deleted(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        assert await tasks.claimer(EntryId("1-1")) is None  # nobody has published anything
        first, second = [await tasks.publish(make_task(request)) for request in "ab"]
        assert await tasks.claimer(first) is None
        await tasks.claim(*P0, 0.0)
        assert await tasks.claimer(first) == P0
        assert await tasks.claimer(second) is None
        await tasks.claim(*P1, 0.0)
        assert [await tasks.claimer(entry) for entry in (first, second)] == [P0, P1]
        await tasks.delete(first)
        assert [await tasks.claimer(entry) for entry in (first, second)] == [None, P1]

    async def test_who_takes_over_a_task_has_claimed_it(self, broker: Broker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        entry = await tasks.publish(make_task("a"))
        await tasks.claim(*P0, 0.0)
        await tasks.abandoned(*P1, 0.0)
        assert await tasks.claimer(entry) == P1

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

    async def test_b115_tasks_of_a_dead_claimer_are_taken_over(self, harness: Harness) -> None:
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

    async def test_b116_a_task_that_kills_its_workers_is_dropped(self, harness: Harness) -> None:
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
