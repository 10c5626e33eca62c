"""Workers told to leave with work in hand: what fits into the drain time ends there, the rest goes elsewhere."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from common.messages.registry import Role
from tests.support.cluster import Cluster
from tests.support.constant_load import Kind, Load
from tests.support.observation import Observation
from tests.support.tiny_models import write_tiny_llama

RESTART_S = 240.0
DRAIN_S = 1.0
LONG = (0, 4, 9)
"""Requests whose 1800 tokens are all clear: fp32 rounds differently in a batch of another size, which may flip a draw
within 1e-6 of a border. Computed in fp64, the greedy ones keep 1e-4 between the best logits, the seeded one 5e-6."""

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of each role with little time to drain; prompts are computed in many small chunks."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--disaggregation", "always"]
    options += ["--prefill", "2", "--decode", "2", "--kv-memory", "64MiB", "--token-budget", "64", "--chunk-size", "32"]
    options += ["--drain-s", str(DRAIN_S)]
    running = Cluster(tmp_path_factory.mktemp("drain"), options).start()
    yield running
    running.stop()


@pytest.fixture
async def observation(cluster: Cluster) -> AsyncIterator[Observation]:
    """A view of the cluster, idle to begin with."""
    async with Observation(cluster) as observation:
        await observation.until_idle(30)
        yield observation


def _body(number: int, num_prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    prompt = [3 + (number + 7 * position + position // 40) % 300 for position in range(num_prompt_tokens)]
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | sampling


async def test_streams_longer_than_the_drain_move_to_another_worker(cluster: Cluster, observation: Observation) -> None:
    """Short and long ones together; both decode workers leave, one after the other."""
    bodies = [_body(number, 40, 1800) for number in LONG] + [_body(2, 40, 8)]
    load = Load(cluster.url, bodies)
    await load.learn()
    moved_before = _num_placed_again(cluster)
    async with load.running([Kind(streams=True, keeps_alive=True)] * 4 + [Kind(streams=False, keeps_alive=True)] * 2):
        await observation.until(lambda overview: _num_running(overview, Role.DECODE) >= 4, 60, "both workers decode")
        await _restart(cluster, "decode")
    assert load.wrong == []
    assert _num_placed_again(cluster) > moved_before
    await observation.until_idle(30)


async def test_a_prefill_worker_leaves_in_the_middle_of_prompts(cluster: Cluster, observation: Observation) -> None:
    load = Load(cluster.url, [_body(10 + number, 1500, 4) for number in range(6)])
    await load.learn()
    async with load.running([Kind(streams=True, keeps_alive=True)] * 2 + [Kind(streams=False, keeps_alive=False)] * 2):
        await observation.until(lambda overview: _num_running(overview, Role.PREFILL) >= 1, 60, "prompts are computed")
        await _restart(cluster, "prefill")
    assert load.wrong == []
    await observation.until_idle(30)


async def _restart(cluster: Cluster, role: str) -> None:
    result = await asyncio.to_thread(
        cluster.tandem, "restart", role, "--state-dir", str(cluster.state_dir), timeout_s=RESTART_S
    )
    assert result.returncode == 0, result.stdout + result.stderr + cluster.logs()
    lines = result.stdout.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [f"{role}-0", f"{role}-1"]
    assert not [line for line in lines if "ended by" in line]  # exit code 0 within the grace period


def _num_running(overview: Any, role: Role) -> int:
    return sum(state.load.num_running for state in overview.workers if state.record.role is role)


def _num_placed_again(cluster: Cluster) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics") as response:
        found = re.search(r'^tandem_placements_total\{.*"again".*\} (.*)$', response.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0
