"""A gateway over a real Redis that is frozen or emptied: running streams go on, new requests are refused quickly."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from common.broker.connection import RedisConnection
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable
from common.messages.chain import chain_of
from common.messages.ids import PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from gateway.engine import GenerateRequest
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.polling import until
from tests.support.redis_database import persistently
from tests.support.redis_server import RedisServer
from tests.support.scripted_worker import MODEL

pytestmark = pytest.mark.redis

REFUSAL_S = 1.5
"""One command's time, and room for a busy machine."""


@pytest.fixture
async def gateway(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    connection = RedisConnection(redis_server.url)
    await persistently(lambda: connection.call("FLUSHALL"))
    running = DispatchHarness(RedisBroker(connection, MODEL))
    yield running
    await running.close()
    await connection.close()


@contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    """Freeze the server meanwhile."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def make_request(name: str) -> GenerateRequest:
    return GenerateRequest(RequestId(name), MODEL, [5, 6, 7], SamplingParams(seed=1, max_tokens=8))


async def refuse(gateway: DispatchHarness, name: str) -> float:
    """Ask while Redis is away; return how long the refusal took."""
    begin_s = time.monotonic()
    with pytest.raises(BrokerUnavailable) as refusal:
        await gateway.collect(make_request(name))
    assert refusal.value.retry_after_s > 0
    return time.monotonic() - begin_s


async def test_a_frozen_redis(gateway: DispatchHarness, redis_server: RedisServer) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request("running")))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    await until(lambda: gateway.shown("running"), "the first token", DEADLINE_S)
    with frozen(redis_server):
        assert await refuse(gateway, "first") < REFUSAL_S
        await until(lambda: gateway.roster.is_away, "the roster to know", DEADLINE_S)
        assert await refuse(gateway, "second") < REFUSAL_S / 3
        worker.send(job, tokens=pb.Tokens(index=1, ids=[10], chain=chain_of([9])))
        worker.send(job, finished=pb.Finished(reason="length", num_generated=2))
        assert ids_of(await running) == [9, 10]
    await until(lambda: not gateway.roster.is_away, "the roster to know", DEADLINE_S)
    await persistently(worker.beat)
    # What was refused may have reached Redis when it thawed: nobody computes it.
    asking = asyncio.create_task(gateway.collect(make_request("third")))
    while (job := await job_of(worker)).request != "third":
        worker.accept(job)
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("first", 1)
    answer(worker, job, [9])
    assert ids_of(await asking) == [9]


async def test_an_emptied_redis(gateway: DispatchHarness, redis_server: RedisServer) -> None:
    """What is running goes on; what waited is placed again and uses up nothing of its budget."""
    worker = await gateway.add_worker("decode-0", seats=1)
    running = asyncio.create_task(gateway.collect(make_request("running")))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    await worker.beat(num_running=1)
    waiting = asyncio.create_task(gateway.collect(make_request("waiting")))

    async def waits() -> bool:
        return await gateway.broker.jobs.whereabouts(RequestId("waiting"), PlacementNumber(1)) == "waiting"

    await until(waits, "a waiting job", DEADLINE_S)
    stream = gateway.dispatcher._streams[RequestId("waiting")]
    await asyncio.to_thread(redis_server.restart)
    await persistently(worker.beat)
    again = await job_of(worker)
    assert (again.request, again.placement) == ("waiting", 2)
    answer(worker, again, [7])
    assert ids_of(await waiting) == [7]
    assert stream.budget.num_failures == 0
    worker.send(job, finished=pb.Finished(reason="length", num_generated=1))
    assert ids_of(await running) == [9]
