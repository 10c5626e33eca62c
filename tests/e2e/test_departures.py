"""Clients that leave at any moment, however they came and whatever they asked for: nothing of them is left anywhere."""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, new_key
from common.broker.connection import RedisConnection
from common.broker.keys import Keys, tenant_keys
from common.messages.ids import ModelName, TenantId
from common.messages.tenant import ApiKey, TenantLimits
from common.settings.gateway import own_socket_in
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tandem.cluster.state import StateDir
from tests.support.cluster import Cluster
from tests.support.keyed_gateway import bearer
from tests.support.observation import Observation
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama

MODEL, TENANT = ModelName("tiny"), TenantId("leaver")
LIMITS = TenantLimits(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrent=10**4)
IDLE_S = 90.0
MOMENTS_S = (0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
"""From before the request was read to somewhere in its answer; each way of asking is left at each of them."""

LONG_PROMPT = "the quick brown fox " * 60
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "long prompt": ("/v1/completions", {"model": MODEL, "prompt": LONG_PROMPT}),
    "choices": ("/v1/chat/completions", CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2}),
    "batch": ("/v1/completions", {"model": MODEL, "prompt": ["one", LONG_PROMPT, "three"], "n": 2}),
    "prompt logprobs": ("/v1/completions", {"model": MODEL, "prompt": LONG_PROMPT, "echo": True, "logprobs": 1}),
    "grammar": ("/v1/chat/completions", CHAT | {"response_format": FORMAT}),
    "response": ("/v1/responses", {"model": MODEL, "input": "hello"}),
}

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


class Site:
    """A cluster with few seats, so that some always wait, and a key with limits."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self.cluster = cluster
        self.key = key
        state = StateDir(cluster.state_dir).read_running()
        assert state is not None
        self._state = state

    async def until_baseline(self) -> None:
        """Wait until nobody holds anything: workers, waiting set, limits, gateways."""
        async with Observation(self.cluster) as observation:
            await observation.until_idle(IDLE_S)
        left: list[str] = []

        async def is_empty() -> bool:
            left[:] = await self.left()
            return not left

        await until(is_empty, lambda: f"nothing is left of {left}", IDLE_S, look_s=0.1)

    async def left(self) -> list[str]:
        """Return what in Redis and in the gateways belongs to requests."""
        connection = RedisConnection(self._state.redis_url)
        try:
            return [*await self._left_in(connection), *[name async for name in self._running()]]
        finally:
            await connection.close()

    async def _left_in(self, connection: RedisConnection) -> list[str]:
        keys = Keys(MODEL)
        _, _, permits, leases, _ = tenant_keys(TENANT)
        held = [key.decode() for key in await connection.call("KEYS", "tandem:*:held:*")]
        jobs = [key.decode() for key in await connection.call("KEYS", "tandem:*:jobs:*")]
        used = [key for key in (keys.parked, permits, *held) if await connection.call("HLEN", key)]
        used += [key for key in (keys.waiting, keys.flows, leases) if await connection.call("ZCARD", key)]
        used += [key for key in jobs if await connection.call("XLEN", key)]
        return used

    async def _running(self) -> AsyncIterator[str]:
        for entry in self._state.processes:
            if entry.role == "gateway" and entry.ref is not None:
                connector = aiohttp.UnixConnector(str(own_socket_in(Path(self._state.run_dir), entry.ref.pid)))
                async with (
                    aiohttp.ClientSession(connector=connector) as session,
                    session.get("http://x/metrics") as answer,
                ):
                    if "\ntandem_requests_running 0.0\n" not in await answer.text():
                        yield f"requests of {entry.name}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One worker of each role behind two gateways."""
    folder = tmp_path_factory.mktemp("departures")
    model, key = write_tiny_llama(folder / MODEL), new_key()
    record = ApiKey(TENANT, "leaver", digest_of(key), int(time.time()), LIMITS)
    asyncio.run(FileKeyStore(folder / "keys.json").put(record))
    common = ["--model", str(model), "--served-name", MODEL, "--dtype", "float32", "--kv-memory", "64MiB"]
    options = ["--max-sequences", "8", "--gateways", "2", "--api-keys-file", str(folder / "keys.json")]
    running = Cluster(folder / "state", [*common, *options]).start()
    yield Site(running, key)
    running.stop()


async def test_what_is_left_is_seen(site: Site) -> None:
    """Else the tests below would show nothing."""
    path, body = REQUESTS["chat"]
    fields = body | {"n": 8, "max_tokens": 1500, "ignore_eos": True}
    asked = [asyncio.create_task(_leave(site, path, fields, IDLE_S, "FIN")) for _ in range(2)]
    wanted = {"requests of", "permits", "leases", "waiting", "parked"}

    async def are_seen() -> bool:
        left = await site.left()
        return all(any(name in key for key in left) for name in wanted)

    await until(are_seen, "one is served and one waits", IDLE_S)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await site.until_baseline()


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_over_http(site: Site, name: str, streams: bool) -> None:
    path, fields = REQUESTS[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**fields, limit: 300, "ignore_eos": True, "stream": streams}
    ways = ("FIN", "RST")
    await asyncio.gather(*(_leave(site, path, body, moment_s, way) for moment_s in MOMENTS_S for way in ways))
    await site.until_baseline()
    assert await _is_served(site)


@pytest.mark.parametrize("name", ["text", "choices"])
async def test_over_grpc(site: Site, name: str) -> None:
    request = pb.GenerateRequest(model=MODEL, text=LONG_PROMPT, sampling=pb.Sampling(max_tokens=300, ignore_eos=True))
    request.wants_text = True
    if name == "choices":
        request.num_choices = 3
    metadata = (("authorization", f"Bearer {site.key}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.cluster.rpc_port}") as channel:
        generate = GenerationStub(channel).Generate

        async def leave(moment_s: float) -> None:
            call = generate(request, metadata=metadata)
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(moment_s):
                    async for _ in call:
                        pass
            call.cancel()

        await asyncio.gather(*(leave(moment_s) for moment_s in MOMENTS_S * 2))
        await site.until_baseline()
    assert await _is_served(site)


async def _leave(site: Site, path: str, body: dict[str, Any], moment_s: float, way: str) -> None:
    """Ask, read what comes until that moment, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.cluster.port)
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    with contextlib.closing(writer):
        writer.write("\r\n".join([*head, f"Authorization: Bearer {site.key}", "", ""]).encode() + data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moment_s):
                while await reader.read(1 << 16):
                    pass
        if way == "RST":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _is_served(site: Site) -> bool:
    body: dict[str, Sequence[int] | int | str] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}
    async with (
        aiohttp.ClientSession(headers=bearer(site.key)) as session,
        session.post(f"{site.cluster.url}/v1/completions", json=body) as response,
    ):
        return response.status == 200
