"""Every process of a cluster is replaced under load, and nobody notices: each request gets exactly its tokens."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.state import StateDir
from tests.support.cluster import Cluster
from tests.support.constant_load import KINDS, Load
from tests.support.observation import Observation
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama

RESTART_S = 240.0

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _started(folder: Path, model: Path, *options: str) -> Cluster:
    common = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--kv-memory", "64MiB"]
    return Cluster(folder, [*common, *options]).start()


@pytest.fixture
def twofold(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """Two workers of each role behind one gateway, every prompt prefilled remotely."""
    running = _started(tmp_path, model, "--prefill", "2", "--decode", "2", "--disaggregation", "always")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    """One worker that does everything, behind two gateways."""
    running = _started(tmp_path_factory.mktemp("single"), model, "--prefill", "0", "--decode", "1", "--gateways", "2")
    yield running
    running.stop()


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = [3 + (number + 7 * position) % 300 for position in range(24 + number)]
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | sampling


async def test_a_restart_of_everything_loses_nothing(twofold: Cluster) -> None:
    load = Load(twofold.url, [_body(number, 24) for number in range(8)])
    await load.learn()
    before = _pids(twofold)
    async with load.running(KINDS), load.running(KINDS, pause_s=0.7):
        restarted = await _restart(twofold)
        num_answers = load.num_answers
    assert load.wrong == []
    assert num_answers > len(KINDS)
    assert restarted == [name for name in before if name != "redis"]
    after = _pids(twofold)
    assert not set(after.values()) & {pid for name, pid in before.items() if name != "redis"}
    assert " died " not in (twofold.state_dir / "logs" / "supervisor.log").read_text()
    async with Observation(twofold) as observation:
        await observation.until_idle(30)


async def test_gateways_that_share_a_socket_are_restarted_unnoticed(single: Cluster) -> None:
    load = Load(single.url, [_body(number, 24) for number in range(8)])
    await load.learn()
    async with load.running(KINDS), load.running(KINDS, pause_s=0.2):
        assert await _restart(single, "gateway") == ["gateway-0", "gateway-1"]
    assert load.wrong == []


async def test_while_no_gateway_is_there_connections_wait_for_the_next_one(single: Cluster) -> None:
    """Both are told to leave by somebody else, at once."""
    load = Load(single.url, [_body(number, 24) for number in range(8)])
    await load.learn()
    before = _pids(single)
    async with load.running(KINDS), load.running(KINDS, pause_s=0.2):
        for name in ("gateway-0", "gateway-1"):
            single.kill(name, signal.SIGTERM)
        await until(lambda: not _gateways(single) & set(before.values()), "both have left", 60)
        num_answers = load.num_answers
        await until(lambda: load.num_answers > num_answers + len(KINDS) or load.wrong, "others answer", 60)
    assert load.wrong == []
    log = (single.state_dir / "logs" / "supervisor.log").read_text()
    assert f"gateway-0 (pid {before['gateway-0']}) has left" in log


async def test_without_a_second_decode_worker_running_streams_end_and_new_requests_are_told_to_come_back(
    single: Cluster,
) -> None:
    load = Load(single.url, [_body(number, 200) for number in range(4)])
    await load.learn()
    async with load.running(KINDS, pause_s=0.1):
        assert await _restart(single, "decode") == ["decode-0"]
    assert all("503, retry after 2: " in wrong and '"overloaded"' in wrong for wrong in load.wrong), load.wrong
    async with Observation(single) as observation:
        await observation.until_idle(30)


async def _restart(cluster: Cluster, *names: str) -> list[str]:
    """Return the names of the processes that were restarted, in that order."""
    result = await asyncio.to_thread(
        cluster.tandem, "restart", *names, "--state-dir", str(cluster.state_dir), timeout_s=RESTART_S
    )
    assert result.returncode == 0, result.stdout + result.stderr + cluster.logs()
    lines = result.stdout.splitlines()
    assert not [line for line in lines if "ended by" in line]  # every old process left with exit code 0
    return [line.partition(" ")[0] for line in lines]


def _gateways(cluster: Cluster) -> set[int]:
    """Return the pids of the gateways that run now."""
    state = StateDir(cluster.state_dir).read()
    assert state is not None
    return {entry.ref.pid for entry in state.processes if entry.role == "gateway" and entry.ref is not None}


def _pids(cluster: Cluster) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in cluster.status()["processes"] if row["role"] != "supervisor"}
