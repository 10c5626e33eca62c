"""The fault matrix, rows of single workers: killed, killed and back at once, asked to leave, while a request is at each
of its stages. The cluster has another worker of the role, which takes over."""

import pytest

from tests.support.fault_cells import Scene, holder_of
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_stages import ALL_STAGES, Stage, Undisturbed
from tests.support.fault_table import Table

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

ROLES = ("prefill", "decode")
BOUND_S = 20.0
"""The lease, twice, and some: a try may be lost by silence, and the next one too."""

LEAVE_S = 40.0
"""Drain time and margin."""


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("role", ROLES)
async def test_killed(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str, stage: Stage) -> None:
    scene = Scene(cluster, plain, table, "kill -9", role, BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, role)
    await scene.strike(cluster.processes[name].kill)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
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
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("role", ROLES)
async def test_asked_to_leave(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str, stage: Stage) -> None:
    scene = Scene(cluster, plain, table, "SIGTERM", role, BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, role)
    await scene.strike(cluster.processes[name].terminate)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    assert await cluster.processes[name].ended(LEAVE_S) == 0
    await cluster.restart(name)
    await scene.at_rest()
