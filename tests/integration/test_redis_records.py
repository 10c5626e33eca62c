"""What a broker leaves in Redis, and what it makes of rubbish that it finds there."""

import pytest

from common.broker.connection import RedisConnection
from common.broker.keys import MODELS, Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Placed, PrefixNews, Waiting
from common.broker.redis_broker import RedisBroker
from common.messages.ids import Epoch, PlacementNumber, RequestId, WorkerId
from tests.support.broker_calls import ONLY_D0
from tests.support.broker_harness import LONG_S
from tests.support.broker_records import (
    D0,
    EPOCH,
    FINGERPRINT,
    MODEL,
    P0,
    make_card,
    make_job,
    make_task,
    worker_load,
    worker_record,
)

pytestmark = pytest.mark.redis

KEYS = Keys(MODEL)
TASKS = KEYS.prefill(FINGERPRINT)
JOBS, HELD, PREFIXES, SUM = KEYS.lane(D0, EPOCH)


class TestRubbish:
    async def test_malformed_tasks_are_dropped_and_the_next_one_is_claimed(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        tasks = broker.tasks(FINGERPRINT)
        for fields in (("task", b"\xc1"), ("other", "x"), ("task", b""), ("task", b"\x80")):
            await connection.call("XADD", TASKS, "*", *fields)
        await tasks.publish(make_task("good"))
        delivery = await tasks.claim(*P0, LONG_S)
        assert delivery is not None
        assert delivery.task.request == "good"
        assert await tasks.num_tasks() == 1
        assert (await connection.call("XPENDING", TASKS, "prefill"))[0] == 1

    async def test_malformed_tasks_of_a_dead_claimer_are_dropped(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        tasks = broker.tasks(FINGERPRINT)
        assert await tasks.claim(*P0, 0.0) is None  # makes the group
        await connection.call("XADD", TASKS, "*", "task", b"\xc1")
        await connection.call("XREADGROUP", "GROUP", "prefill", "dead", "STREAMS", TASKS, ">")
        assert await tasks.abandoned(*P0, 0.0) == []
        assert await tasks.num_tasks() == 0

    async def test_malformed_jobs_are_dropped_with_their_reservations(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        await broker.registry.beat(worker_record(), worker_load(10))
        entry = await connection.call("XADD", JOBS, "*", "job", b"\xc1")
        await connection.call("HSET", HELD, entry, "10 1 16")
        assert await broker.jobs.place(make_job("a"), 10, ONLY_D0) == Waiting(0)
        assert await broker.jobs.read(D0, EPOCH, None, 0.0) == []
        assert await connection.call("XLEN", JOBS) == 0
        await broker.registry.beat(worker_record(), worker_load(10))
        assert [queued.job.request for queued in await broker.jobs.read(D0, EPOCH, None, 0.0)] == ["a"]

    async def test_records_of_another_version_are_left_out(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        await broker.registry.beat(worker_record("decode-0"), worker_load())
        await broker.registry.beat(worker_record("decode-1"), worker_load())
        await connection.call("HSET", KEYS.records, "decode-1", b"\xc1")
        await connection.call("SET", KEYS.card, b"\xc1")
        assert [state.record.worker for state in await broker.registry.workers()] == ["decode-0"]
        assert await broker.registry.card() is None

    async def test_b116_only_consumers_without_tasks_are_removed(self, connection: RedisConnection) -> None:
        tasks = RedisBroker(connection, MODEL, BrokerPolicy(consumer_idle_s=0.0)).tasks(FINGERPRINT)
        idle, busy = (WorkerId("idle"), Epoch(1)), (WorkerId("busy"), Epoch(2))
        for consumer in (idle, busy):
            await tasks.publish(make_task(str(consumer[0])))
            delivery = await tasks.claim(*consumer, 0.0)
            assert delivery is not None
            if consumer == idle:
                await tasks.delete(delivery.entry)
        await connection.read(0.05, "XREAD", streams=("nobody-writes-here", "0-0"))  # both have been idle since
        assert await tasks.abandoned(*P0, 60.0) == []
        rows = await connection.call("XINFO", "CONSUMERS", TASKS, "prefill")
        assert {row[1] for row in rows} & {b"idle:1", b"busy:2"} == {b"busy:2"}


class TestReservations:
    async def test_a_placement_looks_at_no_entry_of_others(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        await broker.registry.beat(worker_record(), worker_load(100))
        await connection.call("CONFIG", "RESETSTAT")
        for number in range(4):
            assert isinstance(await broker.jobs.place(make_job(f"r{number}"), 10, ONLY_D0), Placed)
        assert b"cmdstat_hvals" not in await connection.call("INFO", "commandstats")
        assert await connection.call("GET", SUM) == b"40 4 %d 4" % (4 * make_job("r").num_prompt_tokens)
        assert await broker.jobs.place(make_job("large"), 70, ONLY_D0) == Waiting(0)

    async def test_a_withdrawn_job_is_in_no_sum(self, connection: RedisConnection, broker: RedisBroker) -> None:
        await broker.registry.beat(worker_record(), worker_load(20))
        for request in ("a", "b"):
            await broker.jobs.place(make_job(request), 10, ONLY_D0)
        await broker.jobs.withdraw(RequestId("a"), PlacementNumber(1))
        assert await connection.call("GET", SUM) == b"10 1 %d 1" % make_job("b").num_prompt_tokens
        assert isinstance(await broker.jobs.place(make_job("c"), 10, ONLY_D0), Placed)

    @pytest.mark.parametrize("sum_of_others", [None, b"0 0 0 0", b"7 1 7 2"])
    async def test_a_sum_of_another_number_of_entries_is_made_anew(
        self, connection: RedisConnection, broker: RedisBroker, sum_of_others: bytes | None
    ) -> None:
        """As while gateways of a version without sums place jobs, and when Redis has lost one key alone."""
        await broker.registry.beat(worker_record(), worker_load(20))
        await connection.call("HSET", HELD, "1-1", "15 1 16")
        if sum_of_others is None:
            await connection.call("DEL", SUM)
        else:
            await connection.call("SET", SUM, sum_of_others)
        assert await broker.jobs.place(make_job("a"), 10, ONLY_D0) == Waiting(0)
        await connection.call("HDEL", HELD, "1-1")
        assert isinstance(await broker.jobs.place(make_job("b"), 10, ONLY_D0), Placed)
        assert len(await broker.jobs.read(D0, EPOCH, None, 0.0)) == 2


class TestGrowth:
    async def test_b121_nothing_grows_with_the_number_of_requests(self, connection: RedisConnection) -> None:
        policy = BrokerPolicy(record_ttl_s=0.05)
        broker = RedisBroker(connection, MODEL, policy)
        tasks = broker.tasks(FINGERPRINT)
        await broker.registry.publish_card(make_card())
        await broker.registry.beat(worker_record(), worker_load())
        after = None
        for number in range(200):
            request = f"r{number}"
            await broker.jobs.place(make_job(request), 10, ONLY_D0)
            await tasks.publish(make_task(request))
            [queued] = await broker.jobs.read(D0, EPOCH, after, 0.0)
            after = queued.entry
            delivery = await tasks.claim(*P0, 0.0)
            assert delivery is not None
            await tasks.delete(delivery.entry)
            if number % 5 == 0:
                await broker.jobs.withdraw(RequestId(request), PlacementNumber(1))
            await broker.registry.beat(worker_record(), worker_load(absorbed=after))
        assert await connection.call("XLEN", JOBS) == 0
        assert await connection.call("HLEN", HELD) == 0
        assert await connection.call("XLEN", TASKS) == 0
        assert (await connection.call("XPENDING", TASKS, "prefill"))[0] == 0
        assert await connection.call("HLEN", KEYS.places) < 100
        assert await connection.call("HLEN", KEYS.places) == await connection.call("ZCARD", KEYS.ages)
        for _ in range(100 // 16 + 1):
            await connection.read(0.05, "XREAD", streams=("nobody-writes-here", "0-0"))
            await broker.registry.beat(worker_record(), worker_load(absorbed=after))
        left = (KEYS.places, KEYS.ages, KEYS.waiting, KEYS.parked, KEYS.flows, KEYS.backlog)
        assert await connection.call("EXISTS", *left) == 0

    async def test_a_replaced_task_is_acknowledged_too(self, connection: RedisConnection, broker: RedisBroker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        first = await tasks.publish(make_task("a", 1))
        assert await tasks.claim(*P0, 0.0) is not None
        await tasks.publish(make_task("a", 2), replaces=first)
        assert (await connection.call("XPENDING", TASKS, "prefill"))[0] == 0

    async def test_b121_every_key_ends_by_itself(self, connection: RedisConnection, broker: RedisBroker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        await broker.registry.publish_card(make_card())
        await broker.registry.beat(worker_record(), worker_load(10))
        for request in ("placed", "waiting"):
            await broker.jobs.place(make_job(request), 10, ONLY_D0)
        await broker.jobs.withdraw(RequestId("never seen"), PlacementNumber(1))
        assert await tasks.claim(*P0, 0.0) is None
        await tasks.publish(make_task("a"))
        await broker.prefixes.tell(D0, EPOCH, PrefixNews(0, [b"12345678"]))
        keys = [key.decode() for key in await connection.call("KEYS", "*")]
        assert {*KEYS.queue, *KEYS.registry, KEYS.card, JOBS, HELD, PREFIXES, SUM, TASKS, MODELS} == set(keys)
        assert {key: ttl for key in keys if (ttl := await connection.call("PTTL", key)) < 0} == {}
