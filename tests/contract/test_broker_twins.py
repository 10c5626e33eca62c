"""Random lives of a cluster, step for step the same in memory and over Redis."""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from common.broker.connection import RedisConnection
from common.broker.memory_broker import MemoryBroker
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate, PrefixNews
from common.broker.redis_broker import RedisBroker
from common.errors import TandemError
from common.messages.ids import (
    ChoiceIndex,
    EntryId,
    Epoch,
    Fingerprint,
    GatewayId,
    PlacementNumber,
    RequestId,
    TenantId,
    WorkerId,
)
from common.messages.job import Job, OpenChoice
from common.messages.prefixes import NO_PREFIXES, PromptPrefixes, name_prefixes
from common.messages.registry import WorkerHealth
from tests.support.broker_harness import Broker
from tests.support.broker_records import FINGERPRINT, MODEL, make_job, worker_load, worker_record
from tests.support.redis_database import emptied
from tests.support.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.redis

WORKERS = [WorkerId(f"decode-{number}") for number in range(3)]
GATEWAY = GatewayId("gateway-0")
FINGERPRINTS = (Fingerprint("old"), Fingerprint("new"))
PREFIXES = name_prefixes(bytes(range(256)) * 12, 16, FINGERPRINT, "")
POLICY = BrokerPolicy(
    worker_ttl_s=600.0,
    gateway_ttl_s=600.0,
    record_ttl_s=600.0,
    max_waiting_requests=6,
    max_waiting_tokens=4000,
    ageing_s=600.0,  # their clocks differ, too
)
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
        record = msgspec.structs.replace(record, fingerprint=FINGERPRINTS[worker == WORKERS[2]])
        await self.broker.registry.beat(record, load)

    async def place(self, job: Job, num_blocks: int, candidates: list[Candidate], prefixes: PromptPrefixes) -> object:
        """Return the answer, or the kind of refusal."""
        try:
            return await self.broker.jobs.place(job, num_blocks, candidates, prefixes)
        except TandemError as error:
            return type(error)

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Tell what has come into a worker's cache."""
        return await self.broker.prefixes.tell(worker, epoch, news)

    async def correct(self, tenant: str, num_tokens: int) -> tuple[int, int]:
        """Correct what a tenant was charged; return what waits."""
        pressure = await self.broker.jobs.beat_gateway(GATEWAY, {TenantId(tenant): num_tokens})
        return pressure.num_requests, pressure.num_tokens

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


def random_job(chance: random.Random) -> Job:
    """Return a job of some request, tenant and size; a request does not change its mind about what it is."""
    request, placement = f"r{chance.randrange(12)}", chance.choice([1, 1, 2, 3])
    kind = random.Random(request)
    return msgspec.structs.replace(
        make_job(request, placement),
        num_prompt_tokens=kind.choice([16, 300, 700]),
        choices=tuple(OpenChoice(ChoiceIndex(index)) for index in range(kind.choice([1, 1, 2]))),
        tenant=TenantId(kind.choice(["", "a", "b"])),
        priority=kind.choice([0, 0, 0, 1]),
        cost=kind.choice([1, 100, 1000]),
        fingerprint=kind.choice([None, None, *FINGERPRINTS]),
    )


def random_news(chance: random.Random) -> PrefixNews:
    """Return that some prefixes of the prompt came or went."""
    names = PREFIXES.names
    return PrefixNews(chance.choice([0, 0, 2]), chance.sample(names, 2), chance.sample(names, chance.randrange(2)))


def random_step(chance: random.Random) -> tuple[str, tuple[object, ...]]:
    """Return the name of a `Side` method and its arguments."""
    worker, epoch = chance.choice(WORKERS), Epoch(chance.choice([1, 1, 1, 2]))
    kinds = ["beat", "place", "read", "withdraw", "where", "leave", "tell", "correct"]
    [kind] = chance.choices(kinds, weights=[6, 10, 2, 2, 2, 1, 2, 1])
    match kind:
        case "beat":
            health = chance.choice(["ready", "ready", "ready", "ready", "loading", "draining"])
            free, running, num_read = chance.randrange(0, 70), chance.randrange(0, 4), chance.randrange(-1, 8)
            return kind, (worker, epoch, free, running, num_read, health)
        case "place":
            chosen = chance.sample(WORKERS, chance.randrange(0, 4))
            candidates = [Candidate(name, epoch, chance.choice([0.0, 1.0, 2.5])) for name in chosen]
            prefixes = chance.choice([NO_PREFIXES, PREFIXES])
            return kind, (random_job(chance), chance.choice([0, 5, 20, 70, 90]), candidates, prefixes)
        case "withdraw" | "where":
            return kind, (f"r{chance.randrange(12)}", chance.choice([1, 1, 2, 3]))
        case "tell":
            return kind, (worker, epoch, random_news(chance))
        case "correct":
            return kind, (chance.choice(["", "a", "b"]), chance.choice([-500, 50]))
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
