"""Two gateways over a real cluster: ready only while tokens come back, and a cancel reaches whoever has the request."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest

from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.cluster import Cluster
from tests.support.observation import Observation
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

PATIENCE_S = 60.0
LOOK_S = 0.1

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tiny model behind two gateways that ask for a proof every second."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32"]
    options += ["--gateways", "2", "--canary-interval-s", "1"]
    running = Cluster(tmp_path_factory.mktemp("readiness"), options).start()
    yield running
    running.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that connects anew for every request, so that it meets both gateways."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(cluster.url, connector=connector) as session:
        yield session


async def test_b110_a_frozen_decode_worker_makes_unready_until_it_answers_again(
    cluster: Cluster, client: aiohttp.ClientSession
) -> None:
    reasons: set[str] = set()

    async def is_ready(*, wanted: bool) -> bool:
        """Whether both gateways, as far as some looks tell, say what is wanted."""
        answers = [await _readiness(client) for _ in range(6)]
        reasons.update(reason for status, reason in answers if status != 200)
        return all((status == 200) is wanted for status, _ in answers)

    await until(lambda: is_ready(wanted=True), "ready", PATIENCE_S, look_s=LOOK_S)
    reasons.clear()
    cluster.kill("decode-0", signal.SIGSTOP)
    try:
        await until(lambda: is_ready(wanted=False), "unready", PATIENCE_S, look_s=LOOK_S)
    finally:
        cluster.kill("decode-0", signal.SIGCONT)
    assert all(reason == "no decode worker is ready" or "no canary has come back" in reason for reason in reasons)
    await until(lambda: is_ready(wanted=True), lambda: f"ready again: {reasons}", PATIENCE_S, look_s=LOOK_S)


async def test_cancels_find_their_gateway(cluster: Cluster, client: aiohttp.ClientSession) -> None:
    errors = await asyncio.gather(*(_cancelled_stream(cluster, client) for _ in range(8)))
    assert errors == ["request_cancelled"] * 8
    async with Observation(cluster) as observation:
        await observation.until_idle(PATIENCE_S)
    async with _generation(cluster) as channel:
        stub: GenerationAsyncStub = GenerationStub(channel)
        assert not (await stub.Cancel(pb.CancelRequest(id="0" * 32))).is_known


async def _cancelled_stream(cluster: Cluster, client: aiohttp.ClientSession) -> str:
    """Cancel a stream behind its first event, over a connection of its own; return the code of its error."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with client.post("/v1/completions", json=body) as response:
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        async with _generation(cluster) as channel:
            stub: GenerationAsyncStub = GenerationStub(channel)
            assert (await stub.Cancel(pb.CancelRequest(id=first["id"]), timeout=PATIENCE_S)).is_known
        lines = [line async for line in response.content if line.strip()]
    last: dict[str, dict[str, str]] = json.loads(lines[-1].removeprefix(b"data: "))
    return last["error"]["code"]


def _generation(cluster: Cluster) -> grpc.aio.Channel:
    """Return a channel with a connection of its own, which any gateway may get."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{cluster.rpc_port}", options=[("grpc.use_local_subchannel_pool", 1)])


async def _readiness(client: aiohttp.ClientSession) -> tuple[int, str]:
    async with client.get("/health/ready") as response:
        return response.status, (await response.json()).get("reason", "")
