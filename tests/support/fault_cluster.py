"""A cluster of real processes whose every link the harness owns: Redis, workers and gateways as direct children.

Each process reaches Redis through a proxy of its own. Workers listen on 127.0.0.1 and tell the others an address of the
same loopback network on which only proxies listen, so peers and pages pass through the harness. Nothing restarts by
itself: a test says when a process comes back, at the same addresses.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from common.broker.overview import Observer, Overview
from common.errors import BrokerUnavailable
from common.messages.registry import Role, WorkerHealth
from tandem.cluster.topology import child_environment
from tests.support.byte_link import ByteLink
from tests.support.cluster import free_port
from tests.support.exchange import Exchange
from tests.support.fault_client import MODEL, asking
from tests.support.fault_idle import Idleness
from tests.support.fault_model import MAX_CONTEXT
from tests.support.fault_partition import Partition
from tests.support.fault_process import FaultProcess
from tests.support.fault_rpc import RpcLink
from tests.support.fault_rules import Rules
from tests.support.fault_tap import Tap
from tests.support.polling import until
from tests.support.redis_server import server_binaries

PEER_HOST = "127.0.0.2"
"""Where proxies listen. Linux answers on all of 127.0.0.0/8; elsewhere the address must be added to the loopback."""

START_S = 240.0
REGISTRY_S = 15.0
LOOK_S = 0.1
REDIS = "redis"

WORKER_SETTINGS = {
    "TANDEM_SERVED_NAME": MODEL,
    "TANDEM_DTYPE": "float32",
    "TANDEM_DEVICE": "cpu",
    "TANDEM_TRANSFER": "tcp",
    "TANDEM_BLOCK_SIZE": "16",
    "TANDEM_CHUNK_SIZE": "32",
    "TANDEM_TOKEN_BUDGET": "64",
    "TANDEM_KV_MEMORY": "8MiB",
    "TANDEM_MAX_SEQUENCES": "32",
    "TANDEM_THREADS": "1",
    "TANDEM_DISAGGREGATION": "always",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many of each, and settings that differ from the usual ones (TANDEM_...)."""

    num_prefill: int = 2
    num_decode: int = 2
    num_gateways: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[str]:
        """Names of the workers' seats."""
        prefill = [f"prefill-{number}" for number in range(self.num_prefill)]
        return prefill + [f"decode-{number}" for number in range(self.num_decode)]

    @property
    def gateways(self) -> list[str]:
        """Names of the gateways."""
        return [f"gateway-{number}" for number in range(self.num_gateways)]


class FaultCluster:
    """Use it in one event loop. `folder` takes logs."""

    def __init__(self, folder: Path, model: Path, shape: Shape) -> None:
        self.shape = shape
        self.rules = Rules()
        self.tap = Tap()
        self.partition = Partition(lambda: {name: each.pid for name, each in self._living()})
        self.processes: dict[str, FaultProcess] = {}
        self.rpc: dict[str, RpcLink] = {}
        self.pages: dict[int, ByteLink] = {}
        self.redis_links: dict[str, ByteLink] = {}
        self.absent: set[str] = set()
        """Seats that stay empty for now."""
        self._page_ports: dict[str, int] = {}
        self._folder = folder
        self._model = model
        self._secret = secrets.token_hex(16)
        self._redis_port = free_port()
        self._ports = {name: free_port() for name in shape.workers + shape.gateways}
        self._metrics_ports = {name: free_port() for name in shape.workers}
        self._observer: Observer
        self._watching: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def redis_url(self) -> str:
        """Redis itself, past every proxy."""
        return f"redis://127.0.0.1:{self._redis_port}/0"

    def url(self, gateway: str = "gateway-0") -> str:
        """Return the base address of a gateway."""
        return f"http://127.0.0.1:{self._ports[gateway]}"

    @property
    def session(self) -> aiohttp.ClientSession:
        """For looks at health and metrics."""
        assert self._session is not None
        return self._session

    async def start(self) -> None:
        """Start everything and wait until it serves."""
        self._observer = Observer(self.redis_url)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0))
        self._make_processes()
        await self.processes[REDIS].start()
        await until(self._redis_answers, "Redis answers", 20.0)
        for name in self.shape.workers:
            self.rpc[name] = RpcLink(name, PEER_HOST, self._ports[name], self.rules, self.partition)
            await self.rpc[name].start()
        self._watching = asyncio.create_task(self._watch_pages(), name="page links")
        for name in self.shape.workers + self.shape.gateways:
            await self.redis_links[name].start()
            if name not in self.absent:
                await self.processes[name].start()
        await self.until_ready()

    async def close(self) -> None:
        """End every process and link."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.partition.heal()
        for process in self.processes.values():
            await process.end()
        for link in (*self.redis_links.values(), *self.pages.values()):
            await link.close()
        for rpc in self.rpc.values():
            await rpc.close()
        self.pages.clear()
        self._page_ports.clear()
        await self._observer.close()
        if self._session is not None:
            await self._session.close()

    def ask(self, body: Mapping[str, object], gateway: str = "gateway-0", **headers: str) -> Exchange:
        """Send a request."""
        return asking(self.url(gateway), body, headers).start()

    async def restart(self, name: str) -> None:
        """Start a process that has ended, at the same addresses."""
        await self.processes[name].start()
        if name == REDIS:
            await until(self._redis_answers, "Redis answers", 20.0)

    async def overview(self) -> Overview:
        """Return what the registry says now; raises `BrokerUnavailable`."""
        return await self._observer.overview()

    async def until_ready(self, deadline_s: float = START_S) -> None:
        """Wait until every process that runs is ready, as the registry and its own probe say."""
        await until(self._is_ready, lambda: f"ready\n{self.tails()}", deadline_s, look_s=LOOK_S)

    async def until_idle(self, deadline_s: float = 20.0) -> None:
        """Wait until nothing runs, waits or is held anywhere (I2)."""
        idleness = Idleness(self)
        await until(
            idleness.holds, lambda: f"idle again; left: {idleness.left}\n{self.tails()}", deadline_s, look_s=LOOK_S
        )

    async def until_known_dead(self, worker: str) -> None:
        """Wait until the registry does not list a worker that has ended."""

        async def is_gone() -> bool:
            return all(state.record.worker != worker for state in (await self.overview()).workers)

        await until(is_gone, f"the registry has forgotten {worker}", REGISTRY_S, look_s=LOOK_S)

    async def epoch_of(self, worker: str) -> int:
        """Return the epoch of the present life of a worker."""
        return next(state.record.epoch for state in (await self.overview()).workers if state.record.worker == worker)

    def page_link(self, worker: str) -> ByteLink:
        """Return the link to the pages of the present life of a worker."""
        return self.pages[self._page_ports[worker]]

    def metrics_url(self, name: str) -> str:
        """Return where a process shows its metrics."""
        port = self._metrics_ports.get(name, self._ports[name])
        return f"http://127.0.0.1:{port}/metrics"

    async def health_of(self, worker: str) -> str:
        """Return how a worker says that it stands, "" if it says nothing (any more)."""
        try:
            async with self.session.get(f"http://127.0.0.1:{self._metrics_ports[worker]}/health/ready") as response:
                return str((await response.json())["reason"])
        except (aiohttp.ClientError, TimeoutError):
            return ""

    def tails(self) -> str:
        """Return the end of every log, for a failing test's report."""
        return "\n".join(process.tail() for process in self.processes.values())

    async def repair(self) -> None:
        """Make it whole for the next test, whatever the last one has left: links, processes, and all at rest."""
        mistakes = [mistake for link in self.redis_links.values() for mistake in link.mistakes]
        assert not mistakes, mistakes
        await self.heal()
        for name, process in self.processes.items():
            if process.is_running:
                process.thaw()
            elif name not in self.absent:
                await self.restart(name)
        try:
            await self.until_ready()
            await self.until_idle()
        except AssertionError:
            await self.close()
            await self.start()
            raise

    async def heal(self) -> None:
        """End every fault of the links."""
        self.rules.clear()
        await self.partition.heal()
        for link in (*self.redis_links.values(), *self.pages.values()):
            link.heal()
        for rpc in self.rpc.values():
            rpc.refuses_feeds = False

    def _living(self) -> Iterator[tuple[str, FaultProcess]]:
        return ((name, process) for name, process in self.processes.items() if process.is_running)

    def _make_processes(self) -> None:
        binary = next(iter(server_binaries().values()))
        command = [str(binary), "--port", str(self._redis_port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), "--loglevel", "warning"]
        self._add(REDIS, tuple(command), child_environment())
        for name in self.shape.workers + self.shape.gateways:
            port = free_port()
            link = self.redis_links[name] = ByteLink(REDIS, "127.0.0.1", port, self._redis_port)
            if name in self.shape.gateways:
                link.look = self.tap.look
            role = name.partition("-")[0]
            module = "gateway" if role == "gateway" else f"{role}_worker"
            self._add(name, (sys.executable, "-P", "-m", module), self._environment(name, port))

    def _add(self, name: str, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.processes[name] = FaultProcess(name, command, environment, self._folder / f"{name}.log")

    def _environment(self, name: str, redis_port: int) -> dict[str, str]:
        inherited = {key: value for key, value in child_environment().items() if not key.startswith("TANDEM_")}
        common = {
            "TANDEM_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
            "TANDEM_SECRET": self._secret,
            "TANDEM_HOST": "127.0.0.1",
            "TANDEM_PORT": str(self._ports[name]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        own = {"TANDEM_RPC_PORT": "0"}
        if name in self._metrics_ports:
            own = {
                **WORKER_SETTINGS,
                "TANDEM_MODEL": str(self._model),
                "TANDEM_MAX_CONTEXT": str(MAX_CONTEXT),
                "TANDEM_WORKER_ID": name,
                "TANDEM_ADVERTISE_HOST": PEER_HOST,
                "TANDEM_METRICS_PORT": str(self._metrics_ports[name]),
                "TANDEM_SOCKET_DIR": str(self._folder),
            }
        return inherited | common | own | dict(self.shape.settings)

    async def _redis_answers(self) -> bool:
        try:
            await self._observer.ping()
        except BrokerUnavailable:
            return False
        return True

    async def _watch_pages(self) -> None:
        """Put a proxy before every page server as soon as its worker has registered: before it is ready for work."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                for state in (await self.overview()).workers:
                    endpoint = state.record.transfer
                    if endpoint is not None:
                        await self._open_page_link(state.record.worker, endpoint.port)
            await asyncio.sleep(LOOK_S)

    async def _open_page_link(self, worker: str, port: int) -> None:
        self._page_ports[worker] = port
        if port not in self.pages:
            self.pages[port] = ByteLink(worker, PEER_HOST, port, port, self.partition)
            await self.pages[port].start()

    async def _is_ready(self) -> bool:
        living = [name for name, _ in self._living()]
        if any(not process.is_running for process in self.processes.values() if process.name in living):
            return False
        try:
            states = {state.record.worker: state for state in (await self.overview()).workers}
        except BrokerUnavailable:
            return False
        for name in living:
            if name in self.shape.workers:
                state = states.get(name)  # type: ignore[call-overload]  # a worker's name is its id
                is_current = state is not None and state.record.pid == self.processes[name].pid
                if not is_current or state.load.health is not WorkerHealth.READY:
                    return False
            elif name in self.shape.gateways and not await self._probe(name):
                return False
        return True

    async def _probe(self, gateway: str) -> bool:
        try:
            async with self.session.get(f"{self.url(gateway)}/health/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


@contextlib.asynccontextmanager
async def running_faults(folder: Path, model: Path, shape: Shape) -> AsyncIterator[FaultCluster]:
    """Run a cluster until the block is left."""
    cluster = FaultCluster(folder, model, shape)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


def role_of(name: str) -> Role | None:
    """Return the role of a worker's seat, None for others."""
    kind = name.partition("-")[0]
    return Role(kind) if kind in set(Role) else None
