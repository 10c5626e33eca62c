"""Which processes of a fault cluster are cut off from the others: asked by every link before anything passes."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENING = "0A"


class Partition:
    """Messages from and to an isolated process wait until it is healed: nothing is refused, nothing is answered.

    `pids` are the present processes by name. Who has sent something is told by the port that it came from.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._isolated: set[str] = set()
        self._callers: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()

    async def isolate(self, name: str) -> None:
        """Let nothing pass from or to a process."""
        self._callers = await self._look()  # ports may have changed hands
        self._isolated.add(name)
        self._changed.clear()

    async def heal(self) -> None:
        """Let everything pass; what waits goes on."""
        self._isolated.clear()
        self._changed.set()

    async def passage(self, owner: str, port: int) -> None:
        """Wait until what comes from local port `port` may pass to `owner`, or back."""
        while self._isolated:
            if owner not in self._isolated and await self._caller(port) not in self._isolated:
                return
            if self._isolated:
                await self._changed.wait()

    async def _caller(self, port: int) -> str:
        async with self._looking:
            if port not in self._callers:
                self._callers.update(await self._look())
            return self._callers.setdefault(port, "")

    async def _look(self) -> dict[int, str]:
        """Return who has which port; in a thread, as a busy machine has thousands of sockets."""
        return await asyncio.to_thread(_owners_of_ports, dict(self._pids()))


def _owners_of_ports(pids: Mapping[str, int]) -> dict[int, str]:
    owners = {inode: name for name, pid in pids.items() for inode in _socket_inodes(pid)}
    rows = [line.split() for table in SOCKET_TABLES if table.exists() for line in table.read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16): owners[row[9]] for row in rows if row[9] in owners and row[3] != LISTENING
    }


def _socket_inodes(pid: int) -> list[str]:
    inodes = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.append(target[len("socket:[") : -1])
    return inodes
