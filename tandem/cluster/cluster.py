"""One cluster from start to end, as its supervisor lives it:

1. Redis, unless an existing one was given
2. workers and gateways, all at once
3. ready: every worker in the registry, and the gateway says that it could serve
4. until a signal, or until a child refuses to start: restart whoever dies
5. drain, in order; then nothing is left but logs and the secret
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import StartupError
from common.lifecycle.signals import StopSignals
from tandem.cluster.child import WORKER_ROLES, Child, ChildSpec
from tandem.cluster.events import Draining, Narrator
from tandem.cluster.identity import ref_of
from tandem.cluster.state import ClusterState, ProcessEntry, StateDir
from tandem.cluster.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Phase:
    """Processes that are started together, and how to tell that the next phase may begin."""

    specs: Sequence[ChildSpec]
    ready: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a cluster may take to become ready, and its running requests to finish (seconds)."""

    ready_timeout_s: float
    drain_s: float


class Cluster:
    """Owns the processes of this host and their entry in the state directory, whose lock the caller holds."""

    def __init__(self, state_dir: StateDir, state: ClusterState, limits: Limits, narrate: Narrator) -> None:
        self._state_dir = state_dir
        self._state = state
        self._limits = limits
        self._narrate = narrate
        self._supervisor = Supervisor(state_dir.log_file, self._record, narrate)

    def worker_pids(self) -> dict[str, int | None]:
        """Return who sits in each worker's seat now."""
        children = self._supervisor.children
        return {child.spec.name: child.pid for child in children if child.spec.role in WORKER_ROLES}

    async def run(self, phases: Sequence[Phase], on_ready: Callable[[], None]) -> None:
        """Start the phases one after the other, supervise until a stop signal, and drain.

        Raises `StartupError` if the cluster does not become ready in time, or if a child refuses to start.
        """
        with StopSignals() as signals:
            try:
                await _first_of(self._bring_up(phases), self._supervisor.fail(), signals.stop.wait())
                if not signals.stop.is_set():
                    self._settle(on_ready)
                    await _first_of(self._supervisor.fail(), signals.stop.wait())
            finally:
                if signals.stop.is_set():
                    self._narrate(Draining(self._limits.drain_s))
                await self._supervisor.drain(signals.hurry)

    async def _bring_up(self, phases: Sequence[Phase]) -> None:
        try:
            async with asyncio.timeout(self._limits.ready_timeout_s):
                for phase in phases:
                    self._supervisor.start(phase.specs)
                    await phase.ready()
        except TimeoutError:
            logs = self._state_dir.log_file("*")
            raise StartupError(f"not ready after {self._limits.ready_timeout_s:g} s (logs: {logs})") from None

    def _settle(self, on_ready: Callable[[], None]) -> None:
        self._supervisor.settle()
        self._state = msgspec.structs.replace(self._state, is_ready=True)
        self._record()
        on_ready()

    def _record(self) -> None:
        self._state = msgspec.structs.replace(
            self._state,
            processes=tuple(_entry(child) for child in self._supervisor.children),
        )
        self._state_dir.write(self._state)


def _entry(child: Child) -> ProcessEntry:
    ref = None if child.pid is None else ref_of(child.pid)
    return ProcessEntry(child.spec.name, child.spec.role, ref, child.num_restarts)


async def _first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends, cancel the others, and raise what the ended ones raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
