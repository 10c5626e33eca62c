"""The fault matrix, rows of silence: a process is frozen for 15 s, or its links to the others swallow everything.

One request stands at each stage when it happens; all five are with the process that falls silent.
"""

import asyncio
import time

import pytest

from tests.support.fault_cells import Scene, holder_of
from tests.support.fault_cluster import REDIS, FaultCluster
from tests.support.fault_stages import ALL_STAGES, Undisturbed
from tests.support.fault_table import Table
from tests.support.polling import until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("one_prefill_worker"),
]

FREEZE_S = 15.0
BLACK_HOLE_S = 10.0
"""Longer than the lease (6 s) and than what a gateway waits for a sign of life (4 s)."""

BOUND_S = 20.0
SPARE = "decode-1"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_frozen(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str) -> None:
    scene = Scene(cluster, plain, table, "SIGSTOP 15 s", role, BOUND_S)
    name = await _stage_at_one(scene, role)

    def freeze() -> None:
        cluster.rpc[SPARE].refuses_feeds = False
        cluster.processes[name].freeze()

    await scene.strike(freeze)
    probe_s = await scene.probe()
    assert probe_s < FREEZE_S, "new requests waited for the frozen worker"
    await _until_past(scene, FREEZE_S)
    cluster.processes[name].thaw()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_gateway_frozen(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = Scene(cluster, plain, table, "SIGSTOP 15 s", "gateway", FREEZE_S + BOUND_S, others_at="gateway-1")
    await scene.stage(ALL_STAGES)
    await scene.strike(cluster.processes["gateway-0"].freeze)
    probe_s = await scene.probe()
    await _until_past(scene, FREEZE_S)
    cluster.processes["gateway-0"].thaw()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_redis_frozen(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = Scene(cluster, plain, table, "SIGSTOP 15 s", REDIS, FREEZE_S + BOUND_S)
    await scene.stage(ALL_STAGES)
    await scene.strike(cluster.processes[REDIS].freeze)
    await scene.refused_at_once()
    await scene.settle()
    await _until_past(scene, FREEZE_S)
    cluster.processes[REDIS].thaw()
    scene.record(await scene.probe())
    await scene.at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_worker_cut_off(cluster: FaultCluster, plain: Undisturbed, table: Table, role: str) -> None:
    """The registry still says that all is well with it: its link to Redis works."""
    scene = Scene(cluster, plain, table, "link black-holed", role, BOUND_S)
    name = await _stage_at_one(scene, role)

    async def isolate() -> None:
        cluster.rpc[SPARE].refuses_feeds = False
        await cluster.partition.isolate(name)

    await scene.strike(isolate)
    probe_s = await scene.probe()
    await _until_past(scene, BLACK_HOLE_S)
    await cluster.partition.heal()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_gateway_cut_off(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = Scene(cluster, plain, table, "link black-holed", "gateway", BLACK_HOLE_S + BOUND_S, others_at="gateway-1")
    await scene.stage(ALL_STAGES)
    await scene.strike(lambda: cluster.partition.isolate("gateway-0"))
    probe_s = await scene.probe()
    await _until_past(scene, BLACK_HOLE_S)
    await cluster.partition.heal()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_redis_cut_off(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    scene = Scene(cluster, plain, table, "link black-holed", REDIS, BLACK_HOLE_S + BOUND_S)
    await scene.stage(ALL_STAGES)

    def hold() -> None:
        for link in cluster.redis_links.values():
            link.hold()

    await scene.strike(hold)
    await scene.refused_at_once()
    await scene.settle()
    await _until_past(scene, BLACK_HOLE_S)
    await cluster.heal()
    scene.record(await scene.probe())
    await scene.at_rest()


async def _stage_at_one(scene: Scene, role: str) -> str:
    """Bring the victims to one worker of the role; return its name. The other decode worker looks dead meanwhile."""
    cluster = scene.cluster
    if role == "decode":
        await cluster.until_ready()
        cluster.rpc[SPARE].refuses_feeds = True
        await until(lambda: cluster.rpc[SPARE].num_feeds == 0, "the spare worker has no gateway", 10.0)
    await scene.stage(ALL_STAGES)
    return holder_of(cluster, scene.victims, role)


async def _until_past(scene: Scene, duration_s: float) -> None:
    """Let the fault last: it is a time, not something to wait for."""
    await asyncio.sleep(max(0.0, scene.struck_at + duration_s - time.monotonic()))
