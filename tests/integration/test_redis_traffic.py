"""Redis loses everything, or says that it is not ready yet, while requests go through it."""

import asyncio
import random
from collections import Counter

import pytest

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Whereabouts
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable
from common.messages.ids import EntryId, PlacementNumber, RequestId
from tests.support.broker_calls import ONLY_D0
from tests.support.broker_harness import LONG_S
from tests.support.broker_records import (
    D0,
    EPOCH,
    FINGERPRINT,
    MODEL,
    P0,
    make_job,
    make_task,
    worker_load,
    worker_record,
)
from tests.support.redis_database import persistently
from tests.support.redis_server import RedisServer, free_port

pytestmark = pytest.mark.redis

KEYS = Keys(MODEL)
LOSSES = [
    ("FLUSHALL",),
    ("DEL", KEYS.lane(D0, EPOCH)[0]),
    ("DEL", *KEYS.lane(D0, EPOCH)),
    ("DEL", KEYS.places),
    ("DEL", KEYS.waiting),
    ("DEL", KEYS.flows, KEYS.shares, KEYS.backlog),
]


class Traffic:
    """One gateway that places requests again when they are nowhere, and one worker that reads and counts them."""

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._absorbed: EntryId | None = None
        self.executed: Counter[tuple[str, int]] = Counter()

    async def work(self) -> None:
        """Read for ever, as a worker does."""
        while True:
            await self._broker.registry.beat(worker_record(), worker_load(absorbed=self._absorbed))
            for queued in await self._broker.jobs.read(D0, EPOCH, self._absorbed, 0.02):
                self._absorbed = queued.entry
                self.executed[queued.job.request, queued.job.placement] += 1

    async def request(self, name: str) -> None:
        """Return when some placement of the request has been executed."""
        placement, num_unknown = 1, 0
        await self._broker.jobs.place(make_job(name), 1, ONLY_D0)
        while not self.executed[name, placement]:
            where = await self._broker.jobs.whereabouts(RequestId(name), PlacementNumber(placement))
            is_read = bool(self.executed[name, placement])
            num_unknown = num_unknown + 1 if where == Whereabouts.UNKNOWN and not is_read else 0
            if num_unknown > 2:
                placement, num_unknown = placement + 1, 0
                await self._broker.jobs.place(make_job(name, placement), 1, ONLY_D0)
            await asyncio.sleep(0.01)  # as a gateway looks again


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: " ".join(loss[:1]) + str(len(loss)))
async def test_b118_what_is_lost_under_traffic_is_placed_again_and_nothing_runs_twice(
    connection: RedisConnection, broker: RedisBroker, loss: tuple[str, ...]
) -> None:
    traffic, dice = Traffic(broker), random.Random(118)
    working = asyncio.create_task(traffic.work())
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(traffic.request(f"r{number}"))
            if number % 12 == 6:
                await connection.call(*loss)
            await asyncio.sleep(dice.random() / 200)
    assert not working.done()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert {name for name, _ in traffic.executed} == {f"r{number}" for number in range(60)}
    assert set(traffic.executed.values()) == {1}, "an entry was delivered twice"


async def test_b117_a_redis_that_is_loading_is_waited_for(redis_server: RedisServer) -> None:
    port = free_port()
    num_refusals = 0

    async def is_loading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_refusals
        while await reader.read(1 << 16):
            num_refusals += 1
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    server = await asyncio.start_server(is_loading, "127.0.0.1", port)
    async with RedisBroker.connect(f"redis://127.0.0.1:{port}/0", MODEL, command_timeout_s=LONG_S) as broker:
        tasks = broker.tasks(FINGERPRINT)
        for attempt in (tasks.claim(*P0, LONG_S), broker.jobs.read(D0, EPOCH, None, LONG_S), broker.registry.workers()):
            with pytest.raises(BrokerUnavailable, match=r"(?i)loading"):
                await asyncio.wait_for(attempt, LONG_S)
        assert num_refusals >= 3
        claimer = asyncio.create_task(persistently(lambda: tasks.claim(*P0, LONG_S)))
        server.close()
        restarted = RedisServer(redis_server._binary, redis_server._folder)
        restarted.port = port
        await asyncio.to_thread(restarted.start)
        try:
            await persistently(lambda: tasks.publish(make_task("a")))
            delivery = await asyncio.wait_for(claimer, LONG_S)
            assert delivery is not None
            assert delivery.task.request == "a"
        finally:
            await asyncio.to_thread(restarted.stop)


async def test_b121_memory_stays_flat(connection: RedisConnection) -> None:
    broker = RedisBroker(connection, MODEL, BrokerPolicy(record_ttl_s=0.05))
    tasks = broker.tasks(FINGERPRINT)
    after: EntryId | None = None

    async def serve(numbers: range) -> int:
        """Return the bytes that Redis uses after so many requests."""
        nonlocal after
        for number in numbers:
            request = f"r{number}"
            await broker.jobs.place(make_job(request, prompt=bytes(4096)), 10, ONLY_D0)
            await tasks.publish(make_task(request))
            [queued] = await broker.jobs.read(D0, EPOCH, after, 0.0)
            delivery = await tasks.claim(*P0, 0.0)
            assert delivery is not None
            await tasks.delete(delivery.entry)
            after = queued.entry
            await broker.registry.beat(worker_record(), worker_load(absorbed=after))
        await connection.call("MEMORY", "PURGE")
        dataset = dict(
            line.split(b":", 1) for line in (await connection.call("INFO", "memory")).split() if b":" in line
        )
        return int(dataset[b"used_memory_dataset"])

    await broker.registry.beat(worker_record(), worker_load())
    warm = await serve(range(300))
    assert await serve(range(300, 1500)) < warm + 256 * 1024  # the prompts alone were 5 MB
    assert await connection.call("XLEN", KEYS.prefill(FINGERPRINT)) == 0
    assert await connection.call("XLEN", KEYS.lane(D0, EPOCH)[0]) == 0
