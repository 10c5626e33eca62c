"""Random lives of a cluster, step for step the same in memory and over Redis."""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest

from common.broker.connection import RedisConnection
from common.broker.memory_broker import MemoryBroker
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate
from common.broker.redis_broker import RedisBroker
from common.errors import TandemError
from common.messages.ids import EntryId, Epoch, PlacementNumber, RequestId, WorkerId
from common.messages.registry import WorkerHealth
from tests.support.broker_harness import Broker
from tests.support.broker_records import MODEL, make_job, worker_load, worker_record
from tests.support.redis_database import emptied
from tests.support.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.redis

WORKERS = [WorkerId(f"decode-{number}") for number in range(3)]
POLICY = BrokerPolicy(worker_ttl_s=600.0, gateway_ttl_s=600.0, record_ttl_s=600.0, max_waiting=6)
NUM_LIVES, NUM_STEPS = 15, 80


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


@pytest.fixture
async def connection(server: RedisServer) -> AsyncIterator[RedisConnection]:
    async with emptied(server) as connection:
        yield connection


@dataclass
class Side:
    """One broker and the entries that its workers have read: their ids differ, their order does not."""

    broker: Broker
    entries: dict[tuple[WorkerId, Epoch], list[EntryId]] = field(default_factory=dict)

    async def beat(self, worker: WorkerId, epoch: Epoch, free: int, running: int, num_read: int, health: str) -> None:
        """Beat with the entry that is the `num_read`-th this worker has ever read."""
        seen = self.entries.setdefault((worker, epoch), [])
        absorbed = seen[min(num_read, len(seen) - 1)] if seen and num_read >= 0 else None
        load = worker_load(free, num_running=running, absorbed=absorbed, health=WorkerHealth(health))
        record = worker_record(worker, epoch, num_blocks=60 + 20 * WORKERS.index(worker), max_sequences=5)
        await self.broker.registry.beat(record, load)

    async def place(self, request: str, placement: int, num_blocks: int, candidates: list[Candidate]) -> object:
        """Return the answer, or the kind of refusal."""
        try:
            return await self.broker.jobs.place(make_job(request, placement), num_blocks, candidates)
        except TandemError as error:
            return type(error)

    async def withdraw(self, request: str, placement: int) -> None:
        """Withdraw a placement."""
        await self.broker.jobs.withdraw(RequestId(request), PlacementNumber(placement))

    async def where(self, request: str, placement: int) -> str:
        """Return where a placement is."""
        return await self.broker.jobs.whereabouts(RequestId(request), PlacementNumber(placement))

    async def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Let a worker leave."""
        await self.broker.registry.leave(worker, epoch)

    async def read(self, worker: WorkerId, epoch: Epoch) -> list[tuple[str, int]]:
        """Read everything that stands in a worker's stream."""
        queued = await self.broker.jobs.read(worker, epoch, None, 0.0)
        seen = self.entries.setdefault((worker, epoch), [])
        seen += [item.entry for item in queued if item.entry not in seen]
        return [(item.job.request, item.job.placement) for item in queued]

    async def workers(self) -> list[tuple[str, int, str]]:
        """Return who is there."""
        states = await self.broker.registry.workers()
        return sorted((state.record.worker, state.record.epoch, state.load.health) for state in states)


def random_step(chance: random.Random) -> tuple[str, tuple[object, ...]]:
    """Return the name of a `Side` method and its arguments."""
    worker, epoch = chance.choice(WORKERS), Epoch(chance.choice([1, 1, 1, 2]))
    request, placement = f"r{chance.randrange(12)}", chance.choice([1, 1, 2, 3])
    kind = chance.choice(
        ["beat", "beat", "beat", "place", "place", "place", "place", "read", "withdraw", "where", "leave"]
    )
    match kind:
        case "beat":
            health = chance.choice(["ready", "ready", "ready", "ready", "loading", "draining"])
            free, running, num_read = chance.randrange(0, 70), chance.randrange(0, 4), chance.randrange(-1, 8)
            return kind, (worker, epoch, free, running, num_read, health)
        case "place":
            chosen = chance.sample(WORKERS, chance.randrange(0, 4))
            candidates = [Candidate(name, epoch, chance.choice([0.0, 1.0, 2.5])) for name in chosen]
            return kind, (request, placement, chance.choice([0, 5, 20, 70, 90]), candidates)
        case "withdraw" | "where":
            return kind, (request, placement)
        case _:
            return kind, (worker, epoch)


@pytest.mark.parametrize("seed", [47, *range(NUM_LIVES)])
async def test_both_brokers_answer_alike(connection: RedisConnection, seed: int) -> None:
    chance = random.Random(seed)
    over_redis, in_memory = Side(RedisBroker(connection, MODEL, POLICY)), Side(MemoryBroker(MODEL, policy=POLICY))
    steps: list[tuple[str, tuple[object, ...]]] = []
    for _ in range(NUM_STEPS):
        name, arguments = random_step(chance)
        steps.append((name, arguments))
        assert await getattr(in_memory, name)(*arguments) == await getattr(over_redis, name)(*arguments), steps
        for worker in WORKERS:
            for epoch in (Epoch(1), Epoch(2)):
                assert await in_memory.read(worker, epoch) == await over_redis.read(worker, epoch), steps
        assert await in_memory.workers() == await over_redis.workers(), steps
