"""One cluster from start to end, as its supervisor lives it:

1. Redis, unless an existing one was given
2. workers and gateways, all at once
3. ready: every worker in the registry, and every gateway says that it could serve
4. open until a signal: restart whoever dies, take orders
5. drain, in order; then nothing is left but logs and the secret
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import StartupError
from common.lifecycle.signals import StopSignals
from tandem.cluster.child import WORKER_ROLES, Child, ChildRole, ChildSpec
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
        self.supervisor = Supervisor(state_dir.log_file, self._record, narrate)

    def worker_pids(self) -> dict[str, int | None]:
        """Return who sits in each worker's seat now."""
        children = self.supervisor.children
        return {child.spec.name: child.pid for child in children if child.spec.role in WORKER_ROLES}

    def gateways(self) -> list[Child]:
        """Return the gateways."""
        return [child for child in self.supervisor.children if child.spec.role is ChildRole.GATEWAY]

    async def run(self, phases: Sequence[Phase], business: AbstractAsyncContextManager[object]) -> None:
        """Start the phases one after the other, supervise until a stop signal, and drain.

        `business` is entered while the cluster is open: from its readiness to the beginning of its end.

        Raises `StartupError` if the cluster does not become ready in time, or if a child refuses to start.
        """
        with StopSignals() as signals:
            try:
                await _first_of(self._bring_up(phases), self.supervisor.fail(), signals.stop.wait())
                if not signals.stop.is_set():
                    self._settle()
                    async with business:
                        await _first_of(self.supervisor.fail(), signals.stop.wait())
            finally:
                if signals.stop.is_set():
                    self._narrate(Draining(self._limits.drain_s))
                await self.supervisor.drain(signals.hurry)

    async def _bring_up(self, phases: Sequence[Phase]) -> None:
        try:
            async with asyncio.timeout(self._limits.ready_timeout_s):
                for phase in phases:
                    self.supervisor.start(phase.specs)
                    await phase.ready()
        except TimeoutError:
            logs = self._state_dir.log_file("*")
            raise StartupError(f"not ready after {self._limits.ready_timeout_s:g} s (logs: {logs})") from None

    def _settle(self) -> None:
        self.supervisor.settle()
        self._state = msgspec.structs.replace(self._state, is_ready=True)
        self._record()

    def _record(self) -> None:
        self._state = msgspec.structs.replace(
            self._state,
            processes=tuple(_entry(child) for child in self.supervisor.children),
        )
        try:
            self._state_dir.write(self._state)
        except OSError:
            # A full disk, or a want of descriptors, must not end a cluster that could go on; the next change is
            # written again, and readers check whether a process lives.
            if not self._state.is_ready:
                raise


def _entry(child: Child) -> ProcessEntry:
    ref = None if child.pid is None else ref_of(child.pid)
    return ProcessEntry(child.spec.name, child.spec.role, ref, child.num_restarts, child.trouble)


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
