"""Invariant I2 of a whole fault cluster: what must be gone when nothing is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.errors import BrokerUnavailable
from common.messages.ids import ModelName
from common.messages.registry import WorkerState
from tests.support.fault_client import MODEL

if TYPE_CHECKING:
    from tests.support.fault_cluster import FaultCluster

GATEWAY_GAUGE = "tandem_requests_running"


class Idleness:
    """Looks at registry, queues and gateways; `left` says what is not at rest."""

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster
        self.left: list[str] = ["not looked yet"]

    async def holds(self) -> bool:
        """Whether nothing is left."""
        try:
            self.left = [*await self._workers(), *await self._queues(), *await self._gateways()]
        except BrokerUnavailable as error:
            self.left = [f"Redis: {error}"]
        return not self.left

    async def _workers(self) -> list[str]:
        overview = await self._cluster.overview()
        left = [problem for state in overview.workers for problem in _problems(state)]
        if overview.num_waiting_jobs or overview.num_prefill_tasks:
            left.append(f"{overview.num_waiting_jobs} waiting jobs, {overview.num_prefill_tasks} prefill tasks")
        return left

    async def _queues(self) -> list[str]:
        connection = RedisConnection(self._cluster.redis_url)
        keys = Keys(ModelName(MODEL))
        left = []
        try:
            overview = await self._cluster.overview()
            for state in overview.workers:
                stream, held, *_ = keys.lane(state.record.worker, state.record.epoch)
                if await connection.call("XLEN", stream) or await connection.call("HLEN", held):
                    left.append(f"jobs of {state.record.worker}")
            for fingerprint in {state.record.fingerprint for state in overview.workers}:
                left += await _pending(connection, keys.prefill(fingerprint))
            if await connection.call("HLEN", keys.parked):
                left.append("parked jobs")
        finally:
            await connection.close()
        return left

    async def _gateways(self) -> list[str]:
        left = []
        for name in self._cluster.shape.gateways:
            if not self._cluster.processes[name].is_running:
                continue
            try:
                async with self._cluster.session.get(self._cluster.metrics_url(name)) as response:
                    families = text_string_to_metric_families(await response.text())
            except (aiohttp.ClientError, TimeoutError) as error:
                left.append(f"{name} does not show its metrics: {error!r}")
                continue
            values = {sample.name: sample.value for family in families for sample in family.samples}
            if values[GATEWAY_GAUGE]:
                left.append(f"{values[GATEWAY_GAUGE]:.0f} requests of {name}")
        return left


async def _pending(connection: RedisConnection, stream: str) -> list[str]:
    if not await connection.call("EXISTS", stream):
        return []
    groups = await connection.call("XINFO", "GROUPS", stream)
    for group in groups:
        facts = dict(zip(group[::2], group[1::2], strict=True))
        if facts[b"pending"]:
            return [f"{facts[b'pending']} prefill tasks claimed and not ended"]
    return []


def _problems(state: WorkerState) -> list[str]:
    load, worker = state.load, state.record.worker
    counts = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "reserved": load.num_reserved,
        "bound": load.num_bindings,
        "quarantined": load.num_quarantined,
        "violations": load.num_violations,
        "blocks taken": load.blocks_total - load.blocks_free,
    }
    return [f"{worker}: {count} {what}" for what, count in counts.items() if count]
