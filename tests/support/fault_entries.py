"""Records of a fault cluster that Redis delivers again, though nobody has written them twice."""

from collections.abc import Mapping

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.messages.ids import Epoch, ModelName, WorkerId
from tests.support.fault_client import MODEL
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_stages import Victim

_KEYS = Keys(ModelName(MODEL))


async def deliver_job_again(cluster: FaultCluster, victim: Victim, worker: str) -> None:
    """Append the victim's first job to the stream of a worker, the one that has it or another."""
    stream = _KEYS.jobs(WorkerId(worker), Epoch(await cluster.epoch_of(worker)))
    job = cluster.tap.jobs[victim.ask.salt]
    connection = RedisConnection(cluster.redis_url)
    try:
        await connection.call("XADD", stream, "*", "job", job, "request", victim.request, "placement", 1, "blocks", 1)
    finally:
        await connection.close()


async def deliver_tasks_again(cluster: FaultCluster) -> dict[bytes, str]:
    """Append every prefill task once more; return the streams of the copies by entry."""
    copies: dict[bytes, str] = {}
    connection = RedisConnection(cluster.redis_url)
    try:
        for fingerprint in {state.record.fingerprint for state in (await cluster.overview()).workers}:
            stream = _KEYS.prefill(fingerprint)
            for _, fields in await connection.call("XRANGE", stream, "-", "+"):
                copies[await connection.call("XADD", stream, "*", *fields)] = stream
    finally:
        await connection.close()
    return copies


async def take_copies_back(cluster: FaultCluster, copies: Mapping[bytes, str]) -> None:
    """Remove copies that have been claimed. Nobody else does it soon: their author, who alone deletes tasks, does not
    know them, so they go when they were taken over too often."""
    connection = RedisConnection(cluster.redis_url)
    try:
        for entry, stream in copies.items():
            assert await connection.call("XACK", stream, "prefill", entry) == 1, f"{entry!r} was never claimed"
            await connection.call("XDEL", stream, entry)
    finally:
        await connection.close()
