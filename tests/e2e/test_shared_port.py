"""Several gateways on one port, those of a supervisor on its socket and others by SO_REUSEPORT: clients are spread over
them, limits of a key count over all of them together."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, new_key
from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, TenantLimits
from common.settings.gateway import own_socket_in
from tandem.cluster.state import StateDir
from tests.support.cluster import Cluster, free_port
from tests.support.keyed_gateway import bearer
from tests.support.observation import Observation
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama

NUM_CONNECTIONS = 60
PER_MINUTE, AT_ONCE = 10, 3
START_S = 120.0
JSON = {"Content-Type": "application/json"}

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Port:
    """Where gateways are, the processes behind it, and keys of each kind that nobody has used."""

    url: str
    pids: list[int]
    store: FileKeyStore

    async def key(self, limits: TenantLimits) -> str:
        """Return a new key, once every gateway takes it."""
        key, name = new_key(), TenantId(f"key-{time.monotonic_ns()}")
        await self.store.put(ApiKey(name, name, digest_of(key), int(time.time()), limits))

        async def is_known() -> bool:
            return all([await self._status(pid, key) == 200 for pid in self.pids])

        await until(is_known, "every gateway knows the key", START_S, look_s=0.2)
        return key

    def connections(self) -> Counter[int]:
        """Return how many clients are connected to each process."""
        port = int(self.url.rpartition(":")[2])
        sockets = {pid: psutil.Process(pid).net_connections("tcp") for pid in self.pids}
        return Counter(
            pid
            for pid, each in sockets.items()
            for socket in each
            if socket.laddr.port == port and socket.status == psutil.CONN_ESTABLISHED
        )

    async def _status(self, pid: int, key: str) -> int:
        path = own_socket_in(self.sockets, pid)
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://gateway/v1/models", headers=bearer(key)) as response,
        ):
            return response.status

    @property
    def sockets(self) -> Path:
        """Where each process answers for itself."""
        commands = [psutil.Process(pid).environ() for pid in self.pids]
        return Path(commands[0]["TANDEM_SOCKET_DIR"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker that does everything behind two gateways that ask for keys."""
    folder = tmp_path_factory.mktemp("shared")
    model = write_tiny_llama(folder / "tiny")
    asyncio.run(_put_first_key(folder))
    common = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--kv-memory", "64MiB"]
    keys = ["--api-keys-file", str(folder / "keys.json")]
    running = Cluster(folder / "state", [*common, *keys, "--prefill", "0", "--gateways", "2"]).start()
    yield running
    running.stop()


@pytest.fixture(params=["supervised", "standalone"])
async def port(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Port]:
    """The two gateways of the supervisor, and two others beside it that share a port of their own."""
    store = FileKeyStore(cluster.state_dir.parent / "keys.json")
    if request.param == "supervised":
        rows = cluster.status()["processes"]
        yield Port(cluster.url, [row["pid"] for row in rows if row["role"] == "gateway"], store)
        return
    async with _standalone(cluster, store) as standing:
        yield standing


@asynccontextmanager
async def _standalone(cluster: Cluster, store: FileKeyStore) -> AsyncIterator[Port]:
    state = StateDir(cluster.state_dir).read_running()
    assert state is not None
    number = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
        "TANDEM_SOCKET_DIR": state.run_dir,
        "TANDEM_SECRET_FILE": str(StateDir(cluster.state_dir).secret_file),
        "TANDEM_API_KEYS_FILE": str(cluster.state_dir.parent / "keys.json"),
    }
    command = ["-m", "gateway", "--redis-url", state.redis_url, "--port", str(number), "--rpc-port", "0"]
    async with AsyncExitStack() as processes:
        pids = [
            await processes.enter_async_context(_running([sys.executable, *command, "--reuse-port"], environment))
            for _ in range(2)
        ]
        standing = Port(f"http://127.0.0.1:{number}", pids, store)
        await until(lambda: _all_listen(standing), "both listen", START_S)
        yield standing


@asynccontextmanager
async def _running(command: Sequence[str], environment: dict[str, str]) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        assert await process.wait() == 0


def _all_listen(standing: Port) -> bool:
    number = int(standing.url.rpartition(":")[2])
    listening = [
        pid
        for pid in standing.pids
        for socket in psutil.Process(pid).net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and socket.laddr.port == number
    ]
    return len(set(listening)) == len(standing.pids)


async def _put_first_key(folder: Path) -> None:
    store = FileKeyStore(folder / "keys.json")
    await store.put(ApiKey(TenantId("first"), "first", digest_of(new_key()), int(time.time()), TenantLimits()))


def test_status_shows_every_gateway(cluster: Cluster) -> None:
    rows = [row for row in cluster.status()["processes"] if row["role"] == "gateway"]
    assert [(row["name"], row["health"]) for row in rows] == [("gateway-0", "ready"), ("gateway-1", "ready")]
    assert len({row["pid"] for row in rows}) == 2


@pytest.mark.parametrize("at_once", [True, False])
async def test_connections_are_spread(port: Port, at_once: bool) -> None:
    async def connect() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return writer

    if at_once:
        writers = await asyncio.gather(*(connect() for _ in range(NUM_CONNECTIONS)))
    else:
        writers = [await connect() for _ in range(NUM_CONNECTIONS)]
    spread = port.connections()
    for writer in writers:
        writer.close()
    assert spread.total() >= NUM_CONNECTIONS
    assert min(spread[pid] for pid in port.pids) >= NUM_CONNECTIONS / 10, spread


async def test_a_minute_of_a_key_is_counted_over_all_of_them(port: Port) -> None:
    key = await port.key(TenantLimits(requests_per_minute=PER_MINUTE))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        statuses = await asyncio.gather(*(_complete(session, port.url, key, 1) for _ in range(4 * PER_MINUTE)))
    assert Counter(statuses) == {200: PER_MINUTE, 429: 3 * PER_MINUTE}


async def test_what_a_key_has_at_once_is_counted_over_all_of_them(port: Port, cluster: Cluster) -> None:
    key = await port.key(TenantLimits(max_concurrent=AT_ONCE))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        answers = [asyncio.create_task(_open(session, port.url, key)) for _ in range(4 * AT_ONCE)]
        responses = await asyncio.gather(*answers)
        statuses = Counter(response.status for response in responses)
        for response in responses:
            response.close()
        assert statuses == {200: AT_ONCE, 429: 3 * AT_ONCE}

        async def has_room() -> bool:
            return await _complete(session, port.url, key, 1) == 200

        await until(has_room, "the slots of those that left", 30.0)
    async with Observation(cluster) as observation:
        await observation.until_idle(60)


async def _complete(session: aiohttp.ClientSession, url: str, key: str, max_tokens: int) -> int:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens}
    async with session.post(f"{url}/v1/completions", json=body, headers=bearer(key)) as response:
        await response.read()
        return response.status


async def _open(session: aiohttp.ClientSession, url: str, key: str) -> aiohttp.ClientResponse:
    """Return a stream that goes on for long, or its refusal."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    return await session.post(f"{url}/v1/completions", data=json.dumps(body), headers=bearer(key) | JSON)
