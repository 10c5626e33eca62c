"""The fault matrix, rows of what Redis delivers: entries that come twice, late, or to a worker that they have left."""

import pytest

from tests.support.fault_cells import Scene
from tests.support.fault_cluster import REDIS, FaultCluster
from tests.support.fault_entries import deliver_job_again, deliver_tasks_again
from tests.support.fault_stages import ALL_STAGES, Undisturbed
from tests.support.fault_table import Table
from tests.support.fault_talk import Talk

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("one_prefill_worker"),
]

BOUND_S = 20.0
DELAY_S = 0.3
DECODE_WORKERS = ("decode-0", "decode-1")


async def test_entries_duplicated(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    """Every job and every task that is under way is delivered a second time."""
    scene = Scene(cluster, plain, table, "message duplicated", REDIS, BOUND_S)
    await scene.stage(ALL_STAGES)

    async def repeat() -> None:
        for victim in scene.victims:
            await deliver_job_again(cluster, victim, cluster.rules.sightings.decode[victim.request])
        assert await deliver_tasks_again(cluster) >= len(ALL_STAGES) - 1  # all but that of the one who decodes

    await scene.strike(repeat)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_entries_reordered(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    """The job of a placement comes to the other worker, as if it had overtaken its own move from there."""
    scene = Scene(cluster, plain, table, "message reordered", REDIS, BOUND_S)
    await scene.stage(ALL_STAGES)

    async def repeat() -> None:
        for victim in scene.victims:
            holder = cluster.rules.sightings.decode[victim.request]
            other = next(worker for worker in DECODE_WORKERS if worker != holder)
            await deliver_job_again(cluster, victim, other)

    await scene.strike(repeat)
    probe_s = await scene.probe()
    await scene.settle()
    scene.record(probe_s)
    await scene.at_rest()


async def test_entries_delayed(cluster: FaultCluster, plain: Undisturbed, table: Table) -> None:
    """Redis takes its time with everything, from placement on."""
    for link in cluster.redis_links.values():
        link.delay_s = DELAY_S
    talk = Talk(cluster, plain, table, "message delayed", REDIS, BOUND_S)
    for stage in ALL_STAGES:
        talk.ask(stage)
    await talk.run()
