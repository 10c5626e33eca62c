"""Looks at a running cluster as `tandem status` does, without starting a process for every look."""

import time
from collections.abc import Callable

from common.broker.overview import Observer, Overview
from common.messages.registry import Role, WorkerState
from tandem.cluster.state import StateDir
from tests.support.cluster import Cluster
from tests.support.polling import until

LOOK_S = 0.02


class Observation:
    """A connection to the Redis of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        state = StateDir(cluster.state_dir).read_running()
        assert state is not None
        self._observer = Observer(state.redis_url)

    async def __aenter__(self) -> "Observation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._observer.close()

    async def overview(self) -> Overview:
        """Return what the registry says now."""
        return await self._observer.overview()

    async def until(self, condition: Callable[[Overview], bool], deadline_s: float, what: str) -> float:
        """Wait until `condition` holds; return how long it took, fail after `deadline_s`."""
        started = time.monotonic()
        overview: Overview | None = None

        async def holds() -> bool:
            nonlocal overview
            overview = await self.overview()
            return condition(overview)

        await until(holds, lambda: f"{what}; last seen: {overview}", deadline_s, look_s=LOOK_S)
        return time.monotonic() - started

    async def until_idle(self, deadline_s: float) -> float:
        """Wait until nothing runs, waits or holds a page (I2)."""
        return await self.until(is_idle, deadline_s, "idle again")


def is_idle(overview: Overview) -> bool:
    """Whether free blocks are at baseline and nothing is running, waiting, reserved or queued."""
    queues = overview.num_waiting_jobs + overview.num_prefill_tasks
    return queues == 0 and all(_is_worker_idle(state) for state in overview.workers)


def worker(overview: Overview, role: Role) -> WorkerState:
    """Return the first worker of a role."""
    return next(state for state in overview.workers if state.record.role is role)


def _is_worker_idle(state: WorkerState) -> bool:
    load = state.load
    busy = load.num_running + load.num_waiting + load.num_reserved
    return busy == 0 and load.blocks_free == load.blocks_total
