"""Many gateways on one Redis, and a Redis that is a node of a cluster."""

import asyncio

import pytest

from common.broker.connection import RedisConnection
from common.broker.limits import Demand as LimitDemand
from common.broker.protocols import Candidate, Placed, Waiting
from common.broker.redis_broker import RedisBroker
from common.broker.redis_keys import RedisKeyStore
from common.broker.redis_limits import RedisLimits
from common.messages.ids import PlacementNumber, RequestId, TenantId, WorkerId
from common.messages.tenant import ApiKey, TenantLimits
from tests.support.broker_calls import ONLY_D0
from tests.support.broker_harness import LONG_S
from tests.support.broker_records import (
    D0,
    EPOCH,
    FINGERPRINT,
    MODEL,
    P0,
    P1,
    make_job,
    make_task,
    worker_load,
    worker_record,
)
from tests.support.redis_database import persistently
from tests.support.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.redis


class TestManyGateways:
    async def test_workers_are_never_overcommitted(
        self, redis_server: RedisServer, connection: RedisConnection
    ) -> None:
        brokers = [RedisBroker.connect(redis_server.url, MODEL, command_timeout_s=LONG_S) for _ in range(4)]
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
                await _count_a_tenant(broker._connection)
                await broker.registry.leave(D0, EPOCH)
                assert len(await broker.registry.workers()) == 1


async def _count_a_tenant(connection: RedisConnection) -> None:
    """Go through what is done for a key, in Redis."""
    store, limits, bounds = RedisKeyStore(connection), RedisLimits(connection), TenantLimits(2, 100, 1)
    await store.put(ApiKey(TenantId("key-{a}"), "alice", "0" * 64, 1, bounds))
    assert await store.read() is not None
    request, tenant = RequestId("a"), TenantId("key-{a}")
    assert (await limits.reserve(tenant, bounds, request, LimitDemand(1, 10))).refusal is None
    assert (await limits.settle(tenant, bounds, request, 20)).refusal is None
    await limits.renew(tenant, {request: 1})
    await limits.look()
    await limits.release(tenant, request, 15)
    assert await store.remove(tenant)
