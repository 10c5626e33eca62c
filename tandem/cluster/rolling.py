"""Replaces the processes of a running cluster one after the other, each only when the one before it is ready again."""

import asyncio
from collections.abc import Sequence

from common.errors import InvalidSetting
from tandem.cluster.child import WORKER_ROLES, Child, ChildRole
from tandem.cluster.events import Restarted
from tandem.cluster.supervisor import Supervisor, UntilReady

NOTICED_S = 2.0
"""Until everybody uses a worker that is ready: gateways and workers read the registry twice a second, then connect."""


class RollingRestart:
    """Restarts processes for one order at a time."""

    def __init__(self, supervisor: Supervisor, until_ready: UntilReady) -> None:
        self._supervisor = supervisor
        self._until_ready = until_ready

    def chosen(self, names: Sequence[str]) -> list[Child]:
        """Return the children of these names or roles; of none given, all but Redis. Raises `InvalidSetting`."""
        children = [child for child in self._supervisor.children if child.spec.role is not ChildRole.REDIS]
        for name in names:
            if not any(name in _names_of(child) for child in children):
                known = ", ".join(child.spec.name for child in children)
                raise InvalidSetting("name", name, f"is no process to restart; there are {known}")
        return [child for child in children if not names or not _names_of(child).isdisjoint(names)]

    async def run(self, child: Child, timeout_s: float) -> Restarted:
        """Replace one process; raise `StartupError` if the new one is not ready within `timeout_s` of its start."""
        loop = asyncio.get_running_loop()
        old_pid, began_s = child.pid, loop.time()
        successor = await self._supervisor.replace(child, self._until_ready, timeout_s)
        if child.spec.role in WORKER_ROLES:
            await asyncio.sleep(NOTICED_S)
        return Restarted(child.spec.name, old_pid, successor.pid, loop.time() - began_s, child.exit_code)


def _names_of(child: Child) -> set[str]:
    return {child.spec.name, str(child.spec.role)}
