"""The fault matrix, rows of the gateway and of Redis: killed, killed and back at once, asked to leave.

One request stands at each stage when it happens. A gateway takes its clients with it; Redis takes nothing that runs.
"""

import time

import pytest

from tests.support.fault_cells import Scene, Verdicts
from tests.support.fault_cluster import REDIS, FaultCluster
from tests.support.fault_stages import ALL_STAGES, Undisturbed
from tests.support.fault_table import Table

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

BOUND_S = 20.0
LEAVE_S = 40.0
RELEASE_S = 10.0
"""Workers give a gateway up that has been away for 5 s."""

GATEWAY, OTHER = "gateway-0", "gateway-1"


async def test_gateway_killed(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = _gateway_scene(cluster, plain, table, "kill -9", Verdicts(may_break=True))
    await scene.stage(ALL_STAGES)
    await scene.strike(cluster.processes[GATEWAY].kill)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    await cluster.until_idle(RELEASE_S + scene.struck_at - time.monotonic())
    await cluster.restart(GATEWAY)
    await scene.at_rest()


async def test_gateway_back_at_once(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    verdicts = Verdicts(may_break=True)
    scene = _gateway_scene(cluster, plain, table, "restart at the same address", verdicts)
    scene.others_at = GATEWAY
    await scene.stage(ALL_STAGES)
    await scene.strike(lambda: _kill_and_start(cluster, GATEWAY))
    probe_s = await scene.probe()
    await scene.settle(verdicts)
    scene.record(probe_s)
    await scene.at_rest()


async def test_gateway_asked_to_leave(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = _gateway_scene(cluster, plain, table, "SIGTERM", Verdicts())
    await scene.stage(ALL_STAGES)
    await scene.strike(cluster.processes[GATEWAY].terminate)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    assert await cluster.processes[GATEWAY].ended(LEAVE_S) == 0
    await cluster.restart(GATEWAY)
    await scene.at_rest()


@pytest.mark.parametrize("fault", ["kill -9", "SIGTERM"])
async def test_redis_gone_and_back_without_its_data(
    cluster: FaultCluster, plain: Undisturbed, table: Table, fault: str
) -> None:
    """What runs ends while it is away."""
    scene = Scene(cluster, plain, table, fault, REDIS, BOUND_S)
    await scene.stage(ALL_STAGES)
    redis = cluster.processes[REDIS]
    await scene.strike(redis.kill if fault == "kill -9" else redis.terminate)
    await redis.ended(10.0)
    await scene.refused_at_once()
    await scene.settle()
    back = time.monotonic()
    await cluster.restart(REDIS)
    scene.bound_s += back - scene.struck_at
    scene.record(await scene.probe())
    await scene.at_rest()


async def test_redis_back_at_once_without_its_data(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = Scene(cluster, plain, table, "restart at the same address", REDIS, BOUND_S)
    await scene.stage(ALL_STAGES)
    await scene.strike(lambda: _kill_and_start(cluster, REDIS))
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


def _gateway_scene(cluster: FaultCluster, plain: Undisturbed, table: Table, fault: str, verdicts: Verdicts) -> Scene:
    return Scene(cluster, plain, table, fault, "gateway", BOUND_S, verdicts, victims_at=GATEWAY, others_at=OTHER)


async def _kill_and_start(cluster: FaultCluster, name: str) -> None:
    cluster.processes[name].kill()
    await cluster.processes[name].ended(5.0)
    await cluster.restart(name)
