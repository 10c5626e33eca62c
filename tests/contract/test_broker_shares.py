"""What tenants were served has no end: however much it is, their turns stay fair and no broker stands still over it."""

import msgspec

from common.broker.policy import BrokerPolicy
from common.broker.protocols import Waiting
from common.messages.ids import GatewayId, TenantId
from common.messages.job import Job
from tests.support.broker_harness import Broker, Harness
from tests.support.broker_records import D0, EPOCH, make_job, worker_load, worker_record

VAST = 2**46
"""Tokens; four of these are more than scores of sorted sets have room for beside a rank."""

UNBOUNDED = BrokerPolicy(max_waiting_tokens=2**60)
GATEWAY = GatewayId("gateway-0")


def job(request: str, tenant: str, *, cost: int = VAST, weight: float = 1.0, priority: int = 0) -> Job:
    """Return a job of a tenant."""
    return msgspec.structs.replace(
        make_job(request), tenant=TenantId(tenant), cost=cost, weight=weight, priority=priority
    )


async def park(broker: Broker, *jobs: Job) -> None:
    """Let jobs wait."""
    for waiting in jobs:
        assert isinstance(await broker.jobs.place(waiting, 10, ()), Waiting)


async def serve(broker: Broker) -> str:
    """Return the request that a worker with one seat gets next."""
    before = await broker.jobs.read(D0, EPOCH, None, 0.0)
    absorbed = before[-1].entry if before else None
    await broker.registry.beat(worker_record(max_sequences=1), worker_load(absorbed=absorbed))
    [queued] = await broker.jobs.read(D0, EPOCH, absorbed, 0.0)
    return queued.job.request


async def served(broker: Broker, num_jobs: int) -> str:
    """Return the initials of so many jobs in the order in which they are served."""
    return "".join([(await serve(broker))[0] for _ in range(num_jobs)])


async def test_turns_stay_fair_when_shares_have_become_vast(harness: Harness) -> None:
    broker = harness.broker(policy=UNBOUNDED)
    for lap in range(6):
        await park(broker, *(job(f"{tenant}{lap}-{number}", tenant) for tenant in "ab" for number in range(3)))
        assert await served(broker, 6) == "ababab"


async def test_a_tenant_of_no_weight_is_served_like_others(harness: Harness) -> None:
    broker = harness.broker(policy=UNBOUNDED)
    await park(broker, *(job(f"a{number}", "a", cost=300, weight=1e-12) for number in range(4)))
    await park(broker, *(job(f"b{number}", "b", cost=300) for number in range(4)))
    assert await served(broker, 8) == "abbbbaaa"
    await park(broker, job("c", "c", cost=300), job("a4", "a", cost=300, weight=1e-12))
    assert set(await served(broker, 2)) == {"a", "c"}


async def test_corrections_without_measure_stop_nobody(harness: Harness) -> None:
    broker = harness.broker(policy=UNBOUNDED)
    for _ in range(3):
        await broker.jobs.beat_gateway(GATEWAY, {TenantId("a"): 2**48})
    await park(broker, job("a0", "a", priority=1), job("a1", "a"), job("b0", "b"), job("b1", "b", priority=1))
    assert [await serve(broker) for _ in range(4)] == ["a0", "b1", "a1", "b0"]


async def test_those_who_wait_keep_what_lies_between_them_when_shares_are_counted_anew(harness: Harness) -> None:
    broker = harness.broker(policy=UNBOUNDED)
    await park(broker, job("d0", "d", cost=1000), job("d1", "d", cost=1000), job("b0", "b", cost=1000))
    assert await serve(broker) == "d0"
    await park(broker, *(job(f"a{number}", "a", priority=1) for number in range(6)))
    assert await served(broker, 8) == "aaaaaabd"
