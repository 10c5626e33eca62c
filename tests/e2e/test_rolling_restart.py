"""Every process of a cluster is replaced under load, and nobody notices: each request gets exactly its tokens."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.constant_load import KINDS, Load
from tests.support.observation import Observation
from tests.support.tiny_models import write_tiny_llama

RESTART_S = 240.0
NUM_GATEWAYS = (1, 2)

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(params=NUM_GATEWAYS, ids=lambda count: f"{count}-gateways", scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of each role, every prompt prefilled remotely."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--disaggregation", "always"]
    options += ["--prefill", "2", "--decode", "2", "--gateways", str(request.param), "--kv-memory", "64MiB"]
    running = Cluster(tmp_path_factory.mktemp("rolling"), options).start()
    yield running
    running.stop()


@pytest.fixture
async def observation(cluster: Cluster) -> AsyncIterator[Observation]:
    """A view of the cluster."""
    async with Observation(cluster) as observation:
        yield observation


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = [3 + (number + 7 * position) % 300 for position in range(24 + number)]
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | sampling


async def test_a_restart_of_everything_loses_nothing(cluster: Cluster, observation: Observation) -> None:
    load = Load(cluster.url, [_body(number, 24) for number in range(8)])
    await load.learn()
    before = _pids(cluster)
    async with load.running(KINDS), load.running(KINDS, pause_s=0.7):
        lines = await _restart(cluster)
        num_answers = load.num_answers
        await asyncio.sleep(0)
    assert load.wrong == []
    assert num_answers > len(KINDS)
    restarted = [line.partition(" ")[0] for line in lines]
    assert restarted == [name for name in before if name != "redis"]
    assert not [line for line in lines if "ended by" in line]  # every old process left with exit code 0
    after = _pids(cluster)
    assert not set(after.values()) & {pid for name, pid in before.items() if name != "redis"}
    assert " died " not in (cluster.state_dir / "logs" / "supervisor.log").read_text()
    await observation.until_idle(30)


async def _restart(cluster: Cluster, *names: str) -> list[str]:
    result = await asyncio.to_thread(
        cluster.tandem, "restart", *names, "--state-dir", str(cluster.state_dir), timeout_s=RESTART_S
    )
    assert result.returncode == 0, result.stdout + result.stderr + cluster.logs()
    return result.stdout.splitlines()


def _pids(cluster: Cluster) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in cluster.status()["processes"] if row["role"] != "supervisor"}
