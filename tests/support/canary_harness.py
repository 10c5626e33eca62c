"""A gateway's view of a cluster of scripted workers that sends canaries, and workers that answer them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from common.messages.job import Job
from gateway import canary as canary_module
from gateway.canary import Canary
from gateway.canary_targets import list_targets
from proto import worker_pb2 as pb
from tests.support.broker_records import make_card
from tests.support.byte_link import ByteLink
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, quicken
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, ScriptedWorker

RARELY_S = 3600.0


class Player:
    """Answers the jobs of a worker until it hangs; then it takes them in and says nothing. One that `fails` says that
    its logits are no numbers.
    """

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker
        self.hangs = False
        self.fails = False
        self.seen: list[Job] = []
        self._playing = asyncio.create_task(self._play())

    async def _play(self) -> None:
        while True:
            job = await self.worker.jobs.get()
            self.seen.append(job)
            if self.hangs:
                self.worker.accept(job)
            elif self.fails:
                self.worker.accept(job)
                self.worker.send(job, failed=pb.Failed(message="invalid_logits"))
            else:
                answer(self.worker, job, [9, 10])
            await self.worker.beat()

    async def close(self) -> None:
        """Stop playing."""
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)


class CanaryHarness(DispatchHarness):
    """A gateway that sends canaries."""

    def __init__(self) -> None:
        super().__init__()
        self.players: list[Player] = []
        self._proving: asyncio.Task[None] | None = None

    async def add_player(self, name: str, epoch: int, *, hangs: bool = False, link: ByteLink | None = None) -> Player:
        """Start a worker that answers, or hangs from the beginning."""
        player = Player(await self.add_worker(name, epoch, seats=64, link=link))
        player.hangs = hangs
        self.players.append(player)
        return player

    def send_canaries(self, interval_s: float) -> None:
        """Begin."""
        targets = partial(list_targets, self.roster)
        canary = Canary(self.dispatcher, targets, self.dispatcher.proofs, self.metrics, interval_s)
        self._proving = asyncio.create_task(canary.watch())

    @property
    def reason(self) -> str:
        """Why the gateway is not ready; empty if it is."""
        return self.dispatcher.readiness().reason

    async def until_ready(self) -> None:
        """Wait for it."""
        await until(lambda: not self.reason, lambda: self.reason, DEADLINE_S)

    async def close(self) -> None:
        """Stop everything."""
        if self._proving is not None:
            self._proving.cancel()
            await asyncio.gather(self._proving, return_exceptions=True)
        for player in self.players:
            await player.close()
        await super().close()


@asynccontextmanager
async def canary_harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CanaryHarness]:
    """A gateway with quick timers: a canary may take 2 s, which a loaded machine needs."""
    quicken(monkeypatch)
    monkeypatch.setattr(canary_module, "LOOK_S", 0.01)
    monkeypatch.setattr(canary_module, "SHORTEST_LIMIT_S", 2.0)
    monkeypatch.setattr(canary_module, "LONGEST_LIMIT_S", 2.0)
    monkeypatch.setattr(canary_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(canary_module, "MARGIN_S", 1.0)
    running = CanaryHarness()
    await running.broker.registry.publish_card(msgspec.structs.replace(make_card(), model=MODEL))
    yield running
    await running.close()
