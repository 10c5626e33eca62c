"""The waiting set under any load: shares of tokens are fair, nobody waits for ever, priorities and ages count."""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.broker.memory_broker import MemoryBroker
from common.broker.policy import BrokerPolicy
from common.messages.ids import EntryId, RequestId, TenantId
from tests.support.broker_records import D0, EPOCH, MODEL, make_job, worker_load, worker_record

AGEING_S = 10.0
LIFE_S = 1e9
POLICY = BrokerPolicy(worker_ttl_s=LIFE_S, gateway_ttl_s=LIFE_S, record_ttl_s=LIFE_S, ageing_s=AGEING_S)


@dataclass
class Queue:
    """A broker whose only worker takes one job after the other, and what was taken."""

    now_s: float = 1000.0
    absorbed: EntryId | None = None
    served: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(MODEL, lambda: self.now_s, POLICY)

    async def add(self, request: str, tenant: str = "", cost: int = 1, priority: int = 0) -> None:
        """Let a job wait."""
        self.now_s += 0.001
        job = msgspec.structs.replace(make_job(request), tenant=TenantId(tenant), cost=cost, priority=priority)
        await self.broker.jobs.place(job, 1, ())

    async def serve(self) -> str | None:
        """Return the next job, None if nobody waits."""
        self.now_s += 0.001
        await self.broker.registry.beat(worker_record(max_sequences=1), worker_load(absorbed=self.absorbed))
        for queued in await self.broker.jobs.read(D0, EPOCH, self.absorbed, 0.0):
            self.absorbed = queued.entry
            self.served.append(queued.job.request)
            return queued.job.request
        return None


@given(
    costs=st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=4), min_size=2, max_size=4),
    late=st.integers(0, 40),
)
def test_tenants_with_backlogs_are_served_equally_many_tokens(costs: list[list[int]], late: int) -> None:
    """Each tenant sends jobs of a few sizes in turn; the last one begins late and gets nothing for the time before."""

    async def live() -> None:
        queue, served, waiting = Queue(), Counter[int](), Counter[int]()
        sizes: dict[str, int] = {}

        async def step(tenants: range) -> None:
            for tenant in tenants:
                while waiting[tenant] < 2:
                    request = f"{tenant}-{len(sizes)}"
                    sizes[request] = costs[tenant][len(sizes) % len(costs[tenant])]
                    await queue.add(request, f"t{tenant}", sizes[request])
                    waiting[tenant] += 1
            request = await queue.serve() or ""
            tenant = int(request.split("-")[0])
            waiting[tenant] -= 1
            served[tenant] += sizes[request]

        for _ in range(late):
            await step(range(len(costs) - 1))
        served.clear()
        for _ in range(60):
            await step(range(len(costs)))
        largest = max(max(own) for own in costs)
        shares = [served[tenant] for tenant in range(len(costs))]
        assert max(shares) - min(shares) <= 2 * largest, "nobody is ahead by more than a job"

    asyncio.run(live())


def test_a_tenant_with_twenty_times_larger_prompts_gets_no_more_than_its_share() -> None:
    async def live() -> None:
        queue, served = Queue(), Counter[str]()
        sizes = {"a": 300, "b": 300, "c": 6000}
        for tenant, size in sizes.items():
            for number in range(400 * 300 // size):
                await queue.add(f"{tenant}{number}", tenant, size)
        for _ in range(600):
            request = await queue.serve()
            assert request is not None
            served[request[0]] += sizes[request[0]]
        fair = sum(served.values()) / 3
        assert all(abs(tokens - fair) <= 0.1 * fair for tokens in served.values()), served

    asyncio.run(live())


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Jobs (tenant, cost, priority) with how many are served before each."""
    tenants, costs = st.sampled_from("abc"), st.integers(1, 500)
    return draw(st.lists(st.tuples(tenants, costs, st.integers(-2, 2), st.integers(0, 2)), max_size=60))


@given(arrivals())
def test_every_job_is_served_once(jobs: list[tuple[str, int, int, int]]) -> None:
    async def live() -> None:
        queue = Queue()
        for number, (tenant, cost, priority, num_served) in enumerate(jobs):
            await queue.add(f"{tenant}{number}", tenant, cost, priority)
            for _ in range(num_served):
                await queue.serve()
        while await queue.serve():
            pass
        assert sorted(queue.served) == sorted(f"{tenant}{number}" for number, (tenant, *_) in enumerate(jobs))
        pressure = await queue.broker.jobs.beat_gateway(make_job("x").gateway)
        assert (pressure.num_requests, pressure.num_tokens) == (0, 0)

    asyncio.run(live())


@given(arrivals())
def test_one_tenants_jobs_of_one_priority_go_in_order_of_arrival(jobs: list[tuple[str, int, int, int]]) -> None:
    async def live() -> None:
        queue = Queue()
        for number, (tenant, cost, priority, num_served) in enumerate(jobs):
            await queue.add(f"{tenant}{priority}:{number}", tenant, cost, priority)
            for _ in range(num_served):
                await queue.serve()
        while await queue.serve():
            pass
        for flow in {request.split(":")[0] for request in queue.served}:
            numbers = [int(request.split(":")[1]) for request in queue.served if request.split(":")[0] == flow]
            assert numbers == sorted(numbers)

    asyncio.run(live())


@given(priority=st.integers(1, 5), rate=st.integers(1, 3))
def test_nobody_is_overtaken_for_longer_than_ageing_allows(priority: int, rate: int) -> None:
    """More urgent jobs come faster than anything is served; the one that waits goes when its time has come."""

    async def live() -> None:
        queue = Queue()
        await queue.add("patient", "a")
        began_s = queue.now_s
        for number in range(300):
            for index in range(rate):
                await queue.add(f"urgent-{number}-{index}", "b", priority=priority)
            queue.now_s += 1.0
            if await queue.serve() == "patient":
                break
        waited_s = queue.now_s - began_s
        assert "patient" in queue.served
        assert waited_s >= AGEING_S * priority / 2 - 2  # priority is worth something, too
        assert waited_s <= AGEING_S * priority * (rate + 1) + 2

    asyncio.run(live())


@given(st.lists(st.sampled_from(["lost", "new"]), min_size=1, max_size=30))
def test_whoever_lost_its_worker_goes_before_all_of_its_priority_in_order_of_age(kinds: list[str]) -> None:
    async def live() -> None:
        queue, numbers = Queue(), itertools.count()
        lost = [f"lost-{next(numbers)}" for kind in kinds if kind == "lost"]
        for request in lost:
            await queue.add(request, "a", 100)
        for _ in lost:
            await queue.serve()
        await queue.broker.registry.leave(D0, EPOCH)
        queue.served.clear()
        again = list(reversed(lost))
        for kind in kinds:
            if kind == "new":
                await queue.add(f"new-{next(numbers)}", "b")
            else:
                queue.now_s += 0.001
                placement = msgspec.structs.replace(make_job(again.pop(0), 2), tenant=TenantId("a"), cost=100)
                await queue.broker.jobs.place(placement, 1, ())
        while await queue.serve():
            pass
        assert queue.served[: len(lost)] == [RequestId(request) for request in lost]

    asyncio.run(live())
