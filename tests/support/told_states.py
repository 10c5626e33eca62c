"""What a prefill worker of the fabric tells about itself: in the registry and at its health endpoint."""

import aiohttp

from common.messages.registry import WorkerHealth, WorkerState
from prefill_worker.worker import PrefillWorker
from tests.support.polling import until
from tests.support.worker_fabric import Fabric, Node

PATIENCE_S = 30.0


async def state_of(fabric: Fabric, node: Node[PrefillWorker]) -> WorkerState | None:
    states = await fabric.broker.registry.workers()
    return next((state for state in states if state.record == node.record), None)


async def until_told(fabric: Fabric, node: Node[PrefillWorker], health: WorkerHealth) -> None:
    async def is_told() -> bool:
        state = await state_of(fabric, node)
        return state is not None and state.load.health is health

    await until(is_told, f"the registry knows that it is {health}", PATIENCE_S)


async def readiness(node: Node[PrefillWorker]) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{node.record.metrics_address}/health/ready") as reply,
    ):
        return reply.status, (await reply.json())["reason"]
