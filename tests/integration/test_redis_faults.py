"""What happens to a broker when Redis restarts, freezes, forgets, or a caller gives up."""

import asyncio
import os
import random
import signal
import time

import pytest

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.broker.protocols import Placed
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable, InvalidSetting
from tests.support.broker_calls import ONLY_D0
from tests.support.broker_harness import LONG_S
from tests.support.broker_records import (
    D0,
    EPOCH,
    FINGERPRINT,
    MODEL,
    P0,
    P1,
    make_card,
    make_job,
    make_task,
    worker_load,
    worker_record,
)
from tests.support.delay_proxy import delayed
from tests.support.polling import until
from tests.support.redis_database import blocked, persistently
from tests.support.redis_server import RedisServer, free_port

pytestmark = pytest.mark.redis

TASKS = Keys(MODEL).prefill(FINGERPRINT)


class TestRestart:
    async def test_b117_blocked_readers_go_on_after_an_empty_restart(
        self, redis_server: RedisServer, broker: RedisBroker
    ) -> None:
        tasks = broker.tasks(FINGERPRINT)
        await broker.registry.publish_card(make_card())
        await broker.registry.beat(worker_record(), worker_load())
        claimer = asyncio.create_task(persistently(lambda: tasks.claim(*P0, LONG_S)))
        reader = asyncio.create_task(persistently(lambda: broker.jobs.read(D0, EPOCH, None, LONG_S)))
        await blocked(broker._connection, 2)
        await asyncio.to_thread(redis_server.restart)
        await persistently(lambda: broker.registry.beat(worker_record(), worker_load()))
        assert await broker.jobs.place(make_job("a"), 1, ONLY_D0) == Placed(D0, EPOCH)
        await tasks.publish(make_task("b"))
        [queued] = await asyncio.wait_for(reader, LONG_S)
        delivery = await asyncio.wait_for(claimer, LONG_S)
        assert queued.job.request == "a"
        assert delivery is not None
        assert delivery.task.request == "b"

    async def test_b118_one_beat_heals_an_empty_redis(self, connection: RedisConnection, broker: RedisBroker) -> None:
        await broker.registry.publish_card(make_card())
        await connection.call("FLUSHALL")
        await connection.call("SCRIPT", "FLUSH")
        assert await broker.registry.card() is None
        await broker.registry.beat(worker_record(), worker_load())
        assert await broker.registry.card() == make_card()
        assert await broker.index.models() == [MODEL]
        assert [state.record for state in await broker.registry.workers()] == [worker_record()]

    async def test_idle_connections_that_a_restart_closed_are_replaced(
        self, redis_server: RedisServer, connection: RedisConnection
    ) -> None:
        await asyncio.gather(*(connection.call("PING") for _ in range(10)))
        await asyncio.to_thread(redis_server.restart)
        await persistently(lambda: connection.call("PING"))
        assert await asyncio.gather(*(connection.call("ECHO", number) for number in range(10))) == [
            str(number).encode() for number in range(10)
        ]

    async def test_b117_killed_clients_say_that_redis_is_away_and_recover(
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
    async def test_b118_a_claimer_survives_the_loss_of_its_group(
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

    async def test_a_task_whose_delivery_was_lost_on_its_way_is_found_again(
        self, redis_server: RedisServer, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        async def is_delivered() -> bool:
            summary = await connection.call("XPENDING", TASKS, "prefill")
            return bool(summary[0] == 2)

        async with delayed(redis_server.port, 0.3) as proxy:
            slow = RedisBroker.connect(f"redis://127.0.0.1:{proxy.port}/0", MODEL)
            async with slow:
                tasks = slow.tasks(FINGERPRINT)
                for request in "ab":
                    await broker.tasks(FINGERPRINT).publish(make_task(request))
                first = await persistently(lambda: tasks.claim(*P0, LONG_S))
                claimer = asyncio.create_task(tasks.claim(*P0, LONG_S))
                await until(is_delivered, "both are ours to Redis", LONG_S)
                proxy.cut()
                with pytest.raises(BrokerUnavailable):
                    await asyncio.wait_for(claimer, LONG_S)
                again = await persistently(lambda: tasks.claim(*P0, LONG_S))
                assert first is not None
                assert again is not None
                assert [first.task.request, again.task.request] == ["a", "b"]
                assert await tasks.claim(*P0, 0.0) is None

    async def test_b118_a_reader_survives_the_loss_of_its_stream(
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

    async def test_a_frozen_redis_costs_one_timeout_and_mixes_up_nothing(self, redis_server: RedisServer) -> None:
        connection = RedisConnection(redis_server.url, command_timeout_s=0.2)
        await connection.call("PING")
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            refusals = await asyncio.gather(
                *(connection.call("ECHO", number) for number in range(100)), return_exceptions=True
            )
            assert time.monotonic() - begin < LONG_S / 2
            assert all(isinstance(refusal, BrokerUnavailable) for refusal in refusals)
            assert not [refusal for refusal in refusals if str(refusal).rstrip().endswith(":")]  # a reason is named
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        assert await persistently(lambda: connection.call("ECHO", "mine")) == b"mine"
        await connection.close()

    async def test_b117_a_replica_is_no_redis_to_write_to(
        self, connection: RedisConnection, broker: RedisBroker
    ) -> None:
        await broker.registry.beat(worker_record(), worker_load())
        await connection.call("REPLICAOF", "127.0.0.1", free_port())
        try:
            with pytest.raises(BrokerUnavailable):
                await broker.registry.beat(worker_record(), worker_load())
        finally:
            await connection.call("REPLICAOF", "NO", "ONE")
        await broker.registry.beat(worker_record(), worker_load())

    async def test_a_wrong_password_is_told_without_repeating_it(self, redis_server: RedisServer) -> None:
        broker = RedisBroker.connect(f"redis://:hunter2@127.0.0.1:{redis_server.port}/0", MODEL)
        async with broker:
            with pytest.raises(BrokerUnavailable) as refusal:
                await broker.registry.workers()
        assert "hunter2" not in str(refusal.value)

    def test_a_bad_url_refuses_to_start(self) -> None:
        with pytest.raises(InvalidSetting, match="redis_url"):
            RedisBroker.connect("http://:hunter2@127.0.0.1", MODEL)


class TestCancellation:
    async def test_b119_a_cancelled_command_never_answers_another_one(self, redis_server: RedisServer) -> None:
        chance = random.Random(119)
        async with delayed(redis_server.port, 0.003) as proxy:
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

    async def test_b115_a_task_delivered_to_a_cancelled_claimer_is_taken_over(self, redis_server: RedisServer) -> None:
        async with delayed(redis_server.port, 0.05) as proxy:
            near = RedisBroker.connect(redis_server.url, MODEL, command_timeout_s=LONG_S)
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
