"""Which processes of a fault cluster are cut off from the others: asked by every link before anything passes."""

import asyncio
from collections.abc import Callable, Mapping

import psutil


class Partition:
    """Messages from and to an isolated process wait until it is healed: nothing is refused, nothing is answered.

    `pids` are the present processes by name. Who has sent something is told by the port that it came from.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._isolated: set[str] = set()
        self._callers: dict[int, str] = {}
        self._changed = asyncio.Condition()

    async def isolate(self, name: str) -> None:
        """Let nothing pass from or to a process."""
        self._callers.clear()  # ports may have changed hands
        async with self._changed:
            self._isolated.add(name)

    async def heal(self) -> None:
        """Let everything pass; what waits goes on."""
        async with self._changed:
            self._isolated.clear()
            self._changed.notify_all()

    async def passage(self, owner: str, port: int) -> None:
        """Wait until what comes from local port `port` may pass to `owner`, or back."""
        if self._isolated:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_cut(owner, port))

    def _is_cut(self, owner: str, port: int) -> bool:
        return bool(self._isolated) and (owner in self._isolated or self._caller(port) in self._isolated)

    def _caller(self, port: int) -> str:
        if port not in self._callers:
            self._callers[port] = self._find(port)
        return self._callers[port]

    def _find(self, port: int) -> str:
        for name, pid in self._pids().items():
            try:
                connections = psutil.Process(pid).net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            if any(connection.laddr and connection.laddr.port == port for connection in connections):
                return name
        return ""
