"""A soak: rounds of load under faults, each followed by peace, in which everything must be right and then idle."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.catalogue import Catalogue, NotTheSame, compute
from tests.soak.clients import DEADLINE_S, LONGEST_ANSWER_S, RIGHT, Client, World
from tests.soak.ledger import SETTLE_S, Ledger
from tests.soak.model import write_soak_model
from tests.soak.schedule import Schedule
from tests.soak.strikes import Strikes
from tests.soak.vitals import Life, Vitals
from tests.support.background import running
from tests.support.cluster import free_port
from tests.support.fault_cluster import FaultCluster, Shape, running_faults

CALM_S = 8.0
"""So long the load goes on after a round's faults have settled: nothing excuses an error any more."""

IDLE_S = 60.0
CLIENTS_S = LONGEST_ANSWER_S + 30.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of a soak. `settings`: more settings of all processes (TANDEM_...)."""

    minutes: float
    seed: int
    num_clients: int
    round_s: float
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What a soak has come to."""

    ledger: Ledger
    lives: list[Life]
    num_rounds: int
    duration_s: float


class Soak:
    """One run over one cluster."""

    def __init__(self, options: Options, cluster: FaultCluster, catalogue: Catalogue, rpc_port: int) -> None:
        self._options = options
        self._cluster = cluster
        self._catalogue = catalogue
        self._rpc_address = f"127.0.0.1:{rpc_port}"
        self._schedule = Schedule(options.seed, cluster.shape)
        self._volleys = self._schedule.volleys()
        self._ledger = Ledger()
        self._strikes = Strikes(cluster, self._ledger)
        self._vitals = Vitals(cluster)
        self._clients: list[Client] = []
        self._world: World

    async def run(self) -> Findings:
        """Run all rounds, then ask everything once more, alone."""
        gateways = {name: self._cluster.url(name) for name in self._cluster.shape.gateways}
        self._world = World(self._catalogue, self._ledger, gateways, self._rpc_address, asyncio.Event())
        numbers = range(self._options.num_clients)
        self._clients = [Client(number, self._options.seed, self._world) for number in numbers]
        num_rounds = 0
        async with running(self._vitals.watch()):
            while self._ledger.now_s < self._options.minutes * 60:
                num_rounds += 1
                await self._round()
                say(self._progress(num_rounds))
            await self._verify_alone()
        for life in self._vitals.long_lives():
            if (growth := life.growth()) is not None:
                self._ledger.wrong("not flat", f"{life.name} ({life.pid}): {growth} in {life.duration_s:.0f} s")
        return Findings(self._ledger, list(self._vitals.lives.values()), num_rounds, self._ledger.now_s)

    async def _round(self) -> None:
        """Faults and peace under load, then silence: all clients have ended, and nothing may be held (I2)."""
        num_right = self._ledger.outcomes[RIGHT]
        async with self._load():
            ends = time.monotonic() + self._options.round_s
            while time.monotonic() < ends:
                await self._strikes.volley(next(self._volleys))
            await self._strikes.mend()
            await asyncio.sleep(SETTLE_S + CALM_S)  # the load is what happens meanwhile
        if self._ledger.outcomes[RIGHT] == num_right:
            self._ledger.wrong("nothing served", "no right answer in a whole round")
        await self._strikes.mend()
        try:
            await self._cluster.until_idle(IDLE_S)
        except AssertionError as error:
            self._ledger.wrong("not idle", str(error).splitlines()[0])  # what follows are ends of logs

    @asynccontextmanager
    async def _load(self) -> AsyncIterator[None]:
        """Let all clients ask meanwhile, then wait for what they have asked for."""
        self._world.stopping.clear()
        tasks = [asyncio.create_task(client.run()) for client in self._clients]
        try:
            yield
        finally:
            self._world.stopping.set()
            _, left = await asyncio.wait(tasks, timeout=CLIENTS_S)
            if left:
                self._ledger.wrong("hung", f"{len(left)} clients still wait after {CLIENTS_S} s")
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _verify_alone(self) -> None:
        try:
            await self._catalogue.verify(self._cluster.url())
        except NotTheSame as error:
            self._ledger.wrong("wrong answer, alone", str(error))

    def _progress(self, num_rounds: int) -> str:
        ledger = self._ledger
        return (
            f"{ledger.now_s:5.0f} s: round {num_rounds}, {len(ledger.disturbances)} faults, "
            f"{ledger.outcomes[RIGHT]} right answers, {len(ledger.problems)} problems"
        )


async def soak(options: Options, folder: Path) -> Findings:
    """Start a cluster whose logs go to `folder`, compute the right answers, and soak it."""
    rpc_port = free_port()
    settings = {
        "TANDEM_RPC_PORT": str(rpc_port),
        "TANDEM_REUSE_PORT": "true",
        "TANDEM_DEADLINE_S": str(DEADLINE_S),
        "TANDEM_DISAGGREGATION": "auto",
        **options.settings,
    }
    shape = Shape(num_prefill=2, num_decode=2, num_gateways=2, settings=settings)
    model = write_soak_model(folder / "model")
    async with running_faults(folder, model, shape) as cluster:
        say("computing the undisturbed answers")
        catalogue = await compute(cluster.url())
        return await Soak(options, cluster, catalogue, rpc_port).run()


def say(text: str) -> None:
    """Tell who watches."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
