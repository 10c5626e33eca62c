"""kill -9 of a worker: the supervisor restarts it, and requests succeed without anything else being touched."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from common.messages.registry import Role, WorkerHealth
from tests.support.cluster import Cluster
from tests.support.observation import Observation, worker
from tests.support.tiny_models import write_tiny_llama

RESTART_S = 60.0

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tiny model, every prompt prefilled remotely."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--disaggregation", "always"]
    running = Cluster(tmp_path_factory.mktemp("faults"), options).start()
    yield running
    running.stop()


@pytest.fixture
async def observation(cluster: Cluster) -> AsyncIterator[Observation]:
    """A view of the cluster."""
    async with Observation(cluster) as observation:
        yield observation


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_the_next_request_after_a_kill_succeeds(cluster: Cluster, observation: Observation, role: Role) -> None:
    expected = await _complete(cluster)
    epoch = worker(await observation.overview(), role).record.epoch
    cluster.kill(f"{role}-0")
    assert await _complete(cluster) == expected
    await observation.until(
        lambda overview: any(
            state.record.role is role and state.record.epoch != epoch and state.load.health is WorkerHealth.READY
            for state in overview.workers
        ),
        RESTART_S,
        "the supervisor has restarted it",
    )
    assert await _complete(cluster) == expected
    await observation.until_idle(10)


async def test_a_stream_survives_the_death_of_its_decode_worker(cluster: Cluster, observation: Observation) -> None:
    undisturbed = await _stream(cluster, kill_after=None)
    disturbed = await _stream(cluster, kill_after=3)
    assert disturbed == undisturbed
    await observation.until_idle(10)


async def _complete(cluster: Cluster) -> str:
    """Return the greedy answer, asking again on 503 as every client of OpenAI does."""
    body = {"model": "tiny", "prompt": [*range(20, 60)], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    deadline = asyncio.get_running_loop().time() + RESTART_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status == 200:
                    text: str = answer["choices"][0]["text"]
                    return text
                assert response.status == 503, answer
                assert asyncio.get_running_loop().time() < deadline, answer
                await asyncio.sleep(float(response.headers["Retry-After"]))


async def _stream(cluster: Cluster, kill_after: int | None) -> str:
    body = {
        "model": "tiny",
        "prompt": [*range(30, 70)],
        "max_tokens": 200,
        "temperature": 0.9,
        "seed": 5,
        "ignore_eos": True,
        "stream": True,
    }
    texts: list[str] = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url}/v1/completions", json=body) as response,
    ):
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            texts += [choice["text"] for choice in event["choices"]]
            if len(texts) == kill_after:
                cluster.kill("decode-0")
    return "".join(texts)
