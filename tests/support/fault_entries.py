"""Records of a fault cluster that Redis delivers again, though nobody has written them twice."""

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


async def deliver_tasks_again(cluster: FaultCluster) -> int:
    """Append every prefill task once more; return how many there were."""
    num_copies = 0
    connection = RedisConnection(cluster.redis_url)
    try:
        for fingerprint in {state.record.fingerprint for state in (await cluster.overview()).workers}:
            stream = _KEYS.prefill(fingerprint)
            for _, fields in await connection.call("XRANGE", stream, "-", "+"):
                await connection.call("XADD", stream, "*", *fields)
                num_copies += 1
    finally:
        await connection.close()
    return num_copies
