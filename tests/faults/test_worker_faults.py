"""The fault matrix, rows of single workers: killed, killed and back at once, asked to leave, while a request is at each
of its stages. The cluster has another worker of the role, which takes over."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fault_cells import Scene, holder_of
from tests.support.fault_cluster import FaultCluster, Shape, running_faults
from tests.support.fault_stages import ALL_STAGES, Stage, Undisturbed, undisturbed
from tests.support.fault_table import Table

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

ROLES = ("prefill", "decode")
BOUND_S = 20.0
"""The lease, twice, and some: a try may be lost by silence, and the next one too."""

LEAVE_S = 40.0
"""Drain time and margin."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, fault_model: Path) -> AsyncIterator[FaultCluster]:
    """Two workers of each role."""
    async with running_faults(tmp_path_factory.mktemp("workers"), fault_model, Shape()) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(cluster: FaultCluster) -> Undisturbed:
    """What clients get when nothing happens."""
    return await undisturbed(cluster)


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("role", ROLES)
async def test_killed(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str, stage: Stage) -> None:
    scene = Scene(cluster, plain, table, "kill -9", role, BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, role)
    await scene.strike(cluster.processes[name].kill)
    await scene.settle(await scene.probe())
    await cluster.processes[name].ended(5.0)
    await cluster.restart(name)
    await scene.at_rest()


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("role", ROLES)
async def test_back_at_once(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str, stage: Stage) -> None:
    scene = Scene(cluster, plain, table, "restart at the same address", role, BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, role)

    async def kill_and_start() -> None:
        cluster.processes[name].kill()
        await cluster.processes[name].ended(5.0)
        await cluster.restart(name)

    await scene.strike(kill_and_start)
    await scene.settle(await scene.probe())
    await scene.at_rest()


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("role", ROLES)
async def test_asked_to_leave(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str, stage: Stage) -> None:
    scene = Scene(cluster, plain, table, "SIGTERM", role, BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, role)
    await scene.strike(cluster.processes[name].terminate)
    await scene.settle(await scene.probe())
    assert await cluster.processes[name].ended(LEAVE_S) == 0
    await cluster.restart(name)
    await scene.at_rest()
