"""Requests of dispatcher tests, what they wait for, and a broker that is away."""

import asyncio

import pytest

from common.errors import BrokerUnavailable
from common.messages.ids import PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from gateway.engine import GenerateEvent, GenerateRequest
from gateway.streams import Source
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, ScriptedWorker


def make_request(name: str = "r", *, worker: ScriptedWorker | None = None) -> GenerateRequest:
    """Return a request, for that worker alone if one is given."""
    sampling = SamplingParams(seed=1, max_tokens=8)
    named = None if worker is None else worker.worker
    return GenerateRequest(RequestId(name), MODEL, [5, 6, 7], sampling, worker=named)


def source_of(worker: ScriptedWorker) -> Source:
    """Return this incarnation of a worker."""
    return Source(worker.worker, worker.epoch)


async def start_waiting(gateway: DispatchHarness) -> asyncio.Task[list[GenerateEvent]]:
    """Return a request that waits in Redis while no worker is left."""
    full = await gateway.add_worker("full", 77, seats=0)
    running = asyncio.create_task(gateway.collect(make_request()))
    await until_waiting(gateway)
    await full.stop()
    await until(lambda: not gateway.roster.serving_workers(MODEL))
    return running


async def until_waiting(gateway: DispatchHarness, placement: int = 1) -> None:
    """Return when that placement waits in Redis."""

    async def waits() -> bool:
        where = await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(placement))
        return where == "waiting"

    await until(waits, "a waiting job", DEADLINE_S)


class Away:
    """Redis is away while entered: calls of the job queue and the registry fail."""

    def __init__(self, gateway: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gateway = gateway
        self._patch = monkeypatch.context()
        self.num_places = 0
        self.num_withdrawals = 0

    def __enter__(self) -> "Away":
        patch = self._patch.__enter__()
        for name in ("whereabouts", "beat_gateway"):
            patch.setattr(self._gateway.broker.jobs, name, self._fail)
        patch.setattr(self._gateway.broker.jobs, "withdraw", self._fail_withdraw)
        patch.setattr(self._gateway.broker.jobs, "place", self._fail_place)
        patch.setattr(self._gateway.broker.registry, "workers", self._fail)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(None, None, None)

    async def _fail(self, *arguments: object) -> object:
        raise BrokerUnavailable("away")

    async def _fail_withdraw(self, *arguments: object) -> object:
        self.num_withdrawals += 1
        raise BrokerUnavailable("away")

    async def _fail_place(self, *arguments: object) -> object:
        self.num_places += 1
        raise BrokerUnavailable("away")
