"""What happens to a broker when Redis restarts, freezes, forgets, or holds rubbish."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import TypeVar

import pytest

from common.broker.backoff import backoff
from common.broker.connection import RedisConnection
from common.broker.keys import MODELS, Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate, Placed, Waiting
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable, InvalidSetting
from common.messages.ids import Epoch, PlacementNumber, RequestId, WorkerId
from tests.support.broker_records import (
    FINGERPRINT,
    MODEL,
    make_card,
    make_job,
    make_task,
    worker_load,
    worker_record,
)
from tests.support.delay_proxy import delayed
from tests.support.redis_server import RedisServer, free_port, running_redis

pytestmark = pytest.mark.redis

D0, EPOCH = WorkerId("decode-0"), Epoch(1 << 62)
P0, P1 = (WorkerId("prefill-0"), Epoch(8)), (WorkerId("prefill-1"), Epoch(9))
ONLY_D0 = [Candidate(D0, EPOCH)]
KEYS = Keys(MODEL)
TASKS = KEYS.prefill(FINGERPRINT)
JOBS, HELD = KEYS.lane(D0, EPOCH)
LONG_S = 20.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(server.url, command_timeout_s=LONG_S)
    await connection.call("FLUSHALL")
    yield connection
    await connection.close()


@pytest.fixture
def broker(connection: RedisConnection) -> RedisBroker:
    return RedisBroker(connection, MODEL)


async def persistently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat as callers do until Redis answers."""
    for delay_s in islice(backoff(random.random, first_s=0.01, longest_s=0.1), 200):
        try:
            return await attempt()
        except BrokerUnavailable:
            await asyncio.sleep(delay_s)
    raise AssertionError("Redis did not come back")


async def blocked(connection: RedisConnection, num_clients: int = 1) -> None:
    """Return when so many clients wait in blocking reads."""
    async with asyncio.timeout(LONG_S):
        while f"blocked_clients:{num_clients}".encode() not in await connection.call("INFO", "clients"):
            pass  # each look is a round trip


class TestRestart:
    async def test_blocked_readers_go_on_after_an_empty_restart(self, server: RedisServer, broker: RedisBroker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        await broker.registry.publish_card(make_card())
        await broker.registry.beat(worker_record(), worker_load())
        claimer = asyncio.create_task(persistently(lambda: tasks.claim(*P0, LONG_S)))
        reader = asyncio.create_task(persistently(lambda: broker.jobs.read(D0, EPOCH, None, LONG_S)))
        await blocked(broker._connection, 2)
        await asyncio.to_thread(server.restart)
        await persistently(lambda: broker.registry.beat(worker_record(), worker_load()))
        assert await broker.jobs.place(make_job("a"), 1, ONLY_D0) == Placed(D0, EPOCH)
        await tasks.publish(make_task("b"))
        [queued] = await asyncio.wait_for(reader, LONG_S)
        delivery = await asyncio.wait_for(claimer, LONG_S)
        assert queued.job.request == "a"
        assert delivery is not None
        assert delivery.task.request == "b"

    async def test_one_beat_heals_an_empty_redis(self, connection: RedisConnection, broker: RedisBroker) -> None:
        await broker.registry.publish_card(make_card())
        await connection.call("FLUSHALL")
        await connection.call("SCRIPT", "FLUSH")
        assert await broker.registry.card() is None
        await broker.registry.beat(worker_record(), worker_load())
        assert await broker.registry.card() == make_card()
        assert await broker.index.models() == [MODEL]
        assert [state.record for state in await broker.registry.workers()] == [worker_record()]

    async def test_idle_connections_that_a_restart_closed_are_replaced(
        self, server: RedisServer, connection: RedisConnection
    ) -> None:
        await asyncio.gather(*(connection.call("PING") for _ in range(10)))
        await asyncio.to_thread(server.restart)
        await persistently(lambda: connection.call("PING"))
        assert await asyncio.gather(*(connection.call("ECHO", number) for number in range(10))) == [
            str(number).encode() for number in range(10)
        ]

    async def test_killed_clients_say_that_redis_is_away_and_recover(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        tasks = broker.tasks(FINGERPRINT)
        claimer = asyncio.create_task(tasks.claim(*P0, LONG_S))
        await blocked(connection)
        await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(BrokerUnavailable):
            await asyncio.wait_for(claimer, LONG_S)
        await tasks.publish(make_task("a"))
        assert await tasks.claim(*P0, LONG_S) is not None

    @pytest.mark.parametrize("loss", [("FLUSHALL",), ("DEL", TASKS), ("XGROUP", "DESTROY", TASKS, "prefill")])
    async def test_a_claimer_survives_the_loss_of_its_group(
        self, connection: RedisConnection, broker: RedisBroker, loss: tuple[str, ...]
    ) -> None:
        tasks = broker.tasks(FINGERPRINT)
        claimer = asyncio.create_task(tasks.claim(*P0, LONG_S))
        await blocked(connection)
        await connection.call(*loss)
        await tasks.publish(make_task("a"))
        delivery = await asyncio.wait_for(claimer, LONG_S)
        assert delivery is not None
        assert delivery.task.request == "a"
        await connection.call("FLUSHALL")
        assert await tasks.abandoned(*P0, 0.0) == []
        assert await tasks.num_tasks() == 0

    async def test_a_reader_survives_the_loss_of_its_stream(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        reader = asyncio.create_task(broker.jobs.read(D0, EPOCH, None, LONG_S))
        await blocked(connection)
        await connection.call("FLUSHALL")
        await broker.registry.beat(worker_record(), worker_load())
        await broker.jobs.place(make_job("a"), 1, ONLY_D0)
        [queued] = await asyncio.wait_for(reader, LONG_S)
        assert queued.job.request == "a"


class TestAbsence:
    async def test_nobody_listens(self) -> None:
        broker = RedisBroker.connect(f"redis://127.0.0.1:{free_port()}/0", MODEL)
        async with broker:
            for attempt in (
                broker.registry.beat(worker_record(), worker_load()),
                broker.registry.workers(),
                broker.jobs.place(make_job("a"), 1, ONLY_D0),
                broker.jobs.read(D0, EPOCH, None, LONG_S),
                broker.tasks(FINGERPRINT).claim(*P0, LONG_S),
                broker.index.models(),
            ):
                with pytest.raises(BrokerUnavailable):
                    await asyncio.wait_for(attempt, LONG_S)

    async def test_a_frozen_redis_costs_one_timeout_and_mixes_up_nothing(self, server: RedisServer) -> None:
        connection = RedisConnection(server.url, command_timeout_s=0.2)
        await connection.call("PING")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            refusals = await asyncio.gather(
                *(connection.call("ECHO", number) for number in range(100)), return_exceptions=True
            )
            assert time.monotonic() - begin < LONG_S / 2
            assert all(isinstance(refusal, BrokerUnavailable) for refusal in refusals)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await persistently(lambda: connection.call("ECHO", "mine")) == b"mine"
        await connection.close()

    async def test_a_replica_is_no_redis_to_write_to(self, connection: RedisConnection, broker: RedisBroker) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await connection.call("REPLICAOF", "127.0.0.1", free_port())
        try:
            with pytest.raises(BrokerUnavailable):
                await broker.registry.beat(worker_record(), worker_load())
        finally:
            await connection.call("REPLICAOF", "NO", "ONE")
        await broker.registry.beat(worker_record(), worker_load())

    async def test_a_wrong_password_is_told_without_repeating_it(self, server: RedisServer) -> None:
        broker = RedisBroker.connect(f"redis://:hunter2@127.0.0.1:{server.port}/0", MODEL)
        async with broker:
            with pytest.raises(BrokerUnavailable) as refusal:
                await broker.registry.workers()
        assert "hunter2" not in str(refusal.value)

    def test_a_bad_url_refuses_to_start(self) -> None:
        with pytest.raises(InvalidSetting, match="redis_url"):
            RedisBroker.connect("http://:hunter2@127.0.0.1", MODEL)


class TestCancellation:
    async def test_a_cancelled_command_never_answers_another_one(self, server: RedisServer) -> None:
        chance = random.Random(119)
        async with delayed(server.port, 0.003) as proxy:
            connection = RedisConnection(f"redis://127.0.0.1:{proxy.port}/0", command_timeout_s=LONG_S)
            is_over = asyncio.Event()
            await connection.call("PING")

            async def cancel_many(name: str) -> int:
                num_cancelled = 0
                for number in range(50):
                    command = asyncio.create_task(connection.call("ECHO", f"{name} {number}"))
                    await asyncio.wait({command}, timeout=chance.uniform(0.0, 0.014))
                    num_cancelled += command.cancel()
                    await asyncio.wait({command})
                return num_cancelled

            async def echo_until_over(name: str) -> int:
                num_echoes = 0
                while not is_over.is_set():
                    value = f"innocent {name} {num_echoes}".encode()
                    assert await connection.call("ECHO", value) == value
                    num_echoes += 1
                return num_echoes

            innocents = [asyncio.create_task(echo_until_over(str(number))) for number in range(6)]
            cancelled = await asyncio.gather(*(cancel_many(str(number)) for number in range(20)))
            is_over.set()
            echoes = await asyncio.gather(*innocents)
            assert sum(cancelled) > 300
            assert min(echoes) > 10
            clients = await connection.call("CLIENT", "LIST", "TYPE", "normal")
            assert clients.count(b"\n") <= 40  # 32 commands at once; the cancelled ones are closed, not kept
            await connection.close()

    async def test_a_task_delivered_to_a_cancelled_claimer_is_taken_over(self, server: RedisServer) -> None:
        async with delayed(server.port, 0.05) as proxy:
            near = RedisBroker.connect(server.url, MODEL, command_timeout_s=LONG_S)
            far = RedisBroker.connect(f"redis://127.0.0.1:{proxy.port}/0", MODEL, command_timeout_s=LONG_S)
            async with near, far:
                await near._connection.call("FLUSHALL")
                tasks = near.tasks(FINGERPRINT)
                claimer = asyncio.create_task(far.tasks(FINGERPRINT).claim(*P0, LONG_S))
                await blocked(near._connection)
                await tasks.publish(make_task("a"))  # delivered at once, still on its way to the claimer
                claimer.cancel()
                await asyncio.wait({claimer})
                assert claimer.cancelled()
                assert await tasks.claim(*P1, 0.0) is None
                assert [delivery.task.request for delivery in await tasks.abandoned(*P1, 0.0)] == ["a"]

    async def test_cancelled_blocking_reads_leave_no_connection(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        readers = [asyncio.create_task(broker.jobs.read(D0, EPOCH, None, LONG_S)) for _ in range(20)]
        await blocked(connection, 20)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        await blocked(connection, 0)


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
        await connection.call("HSET", HELD, entry, 10)
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

    async def test_only_consumers_without_tasks_are_removed(self, connection: RedisConnection) -> None:
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


class TestGrowth:
    async def test_nothing_grows_with_the_number_of_requests(self, connection: RedisConnection) -> None:
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
        assert await connection.call("EXISTS", KEYS.places, KEYS.ages, KEYS.waiting, KEYS.parked) == 0

    async def test_a_replaced_task_is_acknowledged_too(self, connection: RedisConnection, broker: RedisBroker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        first = await tasks.publish(make_task("a", 1))
        assert await tasks.claim(*P0, 0.0) is not None
        await tasks.publish(make_task("a", 2), replaces=first)
        assert (await connection.call("XPENDING", TASKS, "prefill"))[0] == 0

    async def test_every_key_ends_by_itself(self, connection: RedisConnection, broker: RedisBroker) -> None:
        tasks = broker.tasks(FINGERPRINT)
        await broker.registry.publish_card(make_card())
        await broker.registry.beat(worker_record(), worker_load(10))
        for request in ("placed", "waiting"):
            await broker.jobs.place(make_job(request), 10, ONLY_D0)
        await broker.jobs.withdraw(RequestId("never seen"), PlacementNumber(1))
        assert await tasks.claim(*P0, 0.0) is None
        await tasks.publish(make_task("a"))
        keys = [key.decode() for key in await connection.call("KEYS", "*")]
        assert {*KEYS.queue, *KEYS.registry, KEYS.card, JOBS, HELD, TASKS, MODELS} == set(keys)
        assert {key: ttl for key in keys if (ttl := await connection.call("PTTL", key)) < 0} == {}


class TestManyGateways:
    async def test_workers_are_never_overcommitted(self, server: RedisServer, connection: RedisConnection) -> None:
        brokers = [RedisBroker.connect(server.url, MODEL, command_timeout_s=LONG_S) for _ in range(4)]
        workers = [worker_record(f"decode-{number}", max_sequences=6) for number in range(3)]
        for worker in workers:
            await brokers[0].registry.beat(worker, worker_load(55))
        candidates = [Candidate(worker.worker, worker.epoch) for worker in workers]
        answers = await asyncio.gather(
            *(brokers[number % 4].jobs.place(make_job(f"r{number}"), 10, candidates) for number in range(100))
        )
        assert sum(isinstance(answer, Placed) for answer in answers) == 15
        assert sorted(answer.num_ahead for answer in answers if isinstance(answer, Waiting)) == list(range(85))
        for worker in workers:
            assert len(await brokers[0].jobs.read(worker.worker, worker.epoch, None, 0.0)) == 5
        for broker in brokers:
            await broker.close()

    async def test_everything_works_on_a_cluster_node(self) -> None:
        with running_redis(options=("--cluster-enabled", "yes")) as node:
            async with RedisBroker.connect(node.url, MODEL, command_timeout_s=LONG_S) as broker:
                await broker._connection.call("CLUSTER", "ADDSLOTS", *range(16384))
                await persistently(lambda: broker.registry.beat(worker_record(), worker_load(10)))
                await broker.registry.beat(worker_record("decode-1"), worker_load(10))
                assert await broker.jobs.place(make_job("a"), 10, ONLY_D0) == Placed(D0, EPOCH)
                other = [Candidate(WorkerId("decode-1"), EPOCH)]
                assert await broker.jobs.place(make_job("a", 2), 10, other) == Placed(WorkerId("decode-1"), EPOCH)
                assert await broker.jobs.place(make_job("b"), 10, other) == Waiting(0)
                await broker.jobs.withdraw(RequestId("a"), PlacementNumber(2))
                await broker.jobs.beat_gateway(make_job("a").gateway)
                tasks = broker.tasks(FINGERPRINT)
                assert await tasks.claim(*P0, 0.0) is None
                await tasks.publish(make_task("c"), replaces=await tasks.publish(make_task("c")))
                assert await tasks.claim(*P0, 0.0) is not None
                assert len(await tasks.abandoned(*P1, 0.0)) == 1
                await broker.registry.leave(D0, EPOCH)
                assert len(await broker.registry.workers()) == 1
