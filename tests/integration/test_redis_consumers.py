"""Consumers of prefill tasks that crash, come back under a new name, or are cleaned up: no task is lost or repeated."""

import asyncio
import os
import signal
import sys

import pytest

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.broker.policy import BrokerPolicy
from common.broker.redis_broker import RedisBroker
from common.messages.ids import Epoch, Fingerprint, WorkerId
from tests.support.broker_harness import LONG_S
from tests.support.broker_records import FINGERPRINT, MODEL, P1, make_task
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.redis

TASKS = Keys(MODEL).prefill(FINGERPRINT)
CLAIMER = f"""
import asyncio
from common.broker.redis_broker import RedisBroker
from common.messages.ids import Epoch, Fingerprint, ModelName, WorkerId

async def claim(url):
    broker = RedisBroker.connect(url, ModelName({MODEL!r}), command_timeout_s={LONG_S})
    delivery = await broker.tasks(Fingerprint({FINGERPRINT!r})).claim(WorkerId("prefill-0"), Epoch(1), {LONG_S})
    print(delivery.task.request, flush=True)
    await asyncio.Event().wait()

import sys
asyncio.run(claim(sys.argv[1]))
"""


async def claim_and_die(server: RedisServer) -> str:
    """Let a process claim a task and kill it before it is done; return the request."""
    claimer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLAIMER, server.url, stdout=asyncio.subprocess.PIPE
    )
    assert claimer.stdout is not None
    request = (await asyncio.wait_for(claimer.stdout.readline(), LONG_S)).decode().strip()
    os.kill(claimer.pid, signal.SIGKILL)
    assert await claimer.wait() == -signal.SIGKILL
    return request


async def num_pending(connection: RedisConnection) -> int:
    return int((await connection.call("XPENDING", TASKS, "prefill"))[0])


async def consumers(connection: RedisConnection) -> set[str]:
    rows = await connection.call("XINFO", "CONSUMERS", TASKS, "prefill")
    return {row[1].decode() for row in rows}


@pytest.mark.parametrize("successor", [("prefill-1", 9), ("prefill-0", 2)], ids=["another", "restarted"])
async def test_b115_the_task_of_a_killed_claimer_is_done_once(
    redis_server: RedisServer, connection: RedisConnection, broker: RedisBroker, successor: tuple[str, int]
) -> None:
    tasks = broker.tasks(FINGERPRINT)
    await tasks.publish(make_task("claimed"))
    await tasks.publish(make_task("waiting"))
    assert await claim_and_die(redis_server) == "claimed"
    worker, epoch = WorkerId(successor[0]), Epoch(successor[1])
    next_one = await tasks.claim(worker, epoch, 0.0)
    assert next_one is not None
    assert next_one.task.request == "waiting"  # what others have claimed is not new
    await tasks.delete(next_one.entry)
    [taken_over] = await tasks.abandoned(worker, epoch, 0.0)
    assert taken_over.task.request == "claimed"
    assert await tasks.abandoned(*P1, LONG_S) == []  # it is in good hands
    await tasks.delete(taken_over.entry)
    assert await num_pending(connection) == 0
    assert await tasks.num_tasks() == 0


async def test_b115_a_stream_that_is_missing_stops_no_other_one(
    connection: RedisConnection, broker: RedisBroker
) -> None:
    for name in ("missing", "there"):
        await broker.tasks(Fingerprint(name)).publish(make_task(name))
        assert await broker.tasks(Fingerprint(name)).claim(WorkerId("dead"), Epoch(1), 0.0) is not None
    await connection.call("DEL", Keys(MODEL).prefill(Fingerprint("missing")))
    found = [
        delivery.task.request
        for name in ("missing", "there", "never there")
        for delivery in await broker.tasks(Fingerprint(name)).abandoned(*P1, 0.0)
    ]
    assert found == ["there"]


async def test_b116_a_consumer_with_tasks_stays_until_all_are_taken_over(connection: RedisConnection) -> None:
    tasks = RedisBroker(connection, MODEL, BrokerPolicy(consumer_idle_s=0.0)).tasks(FINGERPRINT)
    dead = (WorkerId("dead"), Epoch(1))
    for number in range(10):
        await tasks.publish(make_task(f"r{number}"))
        assert await tasks.claim(*dead, 0.0) is not None
    first = (await connection.call("XPENDING", TASKS, "prefill", "-", "+", 1))[0][0]
    await connection.call("XCLAIM", TASKS, "prefill", "somebody", 0, first)  # the clean-up is interrupted behind it
    assert await tasks.abandoned(*P1, 60.0) == []
    assert "dead:1" in await consumers(connection)
    taken = await tasks.abandoned(*P1, 0.0)
    assert [delivery.task.request for delivery in taken] == [f"r{number}" for number in range(10)]
    assert await tasks.abandoned(*P1, 60.0) == []
    assert await consumers(connection) == {"prefill-1:9"}
    assert await num_pending(connection) == 10
