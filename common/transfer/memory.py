"""Page transfer inside one process: the in-memory twin of the real transports, for tests of what uses them."""

import asyncio
import itertools
from collections.abc import Sequence

from common.errors import IncompatiblePeer, PeerUnreachable, StalePage
from common.messages.ids import Epoch
from common.messages.registry import TransferEndpoint
from common.transfer.pool_memory import PoolMemory
from common.transfer.protocols import PageCopy

_HOST = "in-process"


class InProcessTransfer:
    """A network of pools: sources made here can be pulled by the pullers made here."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self._pools: dict[int, PoolMemory] = {}

    def source(self, memory: PoolMemory) -> "InProcessSource":
        """Return a `PageSource` of that pool."""
        return InProcessSource(self._pools, next(self._ports), memory)

    def puller(self, memory: PoolMemory) -> "InProcessPuller":
        """Return a `PagePuller` that writes into that pool."""
        return InProcessPuller(self._pools, memory)


class InProcessSource:
    """Implements `PageSource`."""

    def __init__(self, pools: dict[int, PoolMemory], port: int, memory: PoolMemory) -> None:
        self._pools = pools
        self._port = port
        self._memory = memory

    async def start(self) -> TransferEndpoint:
        """Become reachable; the endpoint means something to pullers of the same `InProcessTransfer` only."""
        self._pools[self._port] = self._memory
        return TransferEndpoint(host=_HOST, port=self._port)

    async def close(self) -> None:
        """Vanish."""
        self._pools.pop(self._port, None)


class InProcessPuller:
    """Implements `PagePuller`. Gives the loop a turn before each page, so that it can be cancelled between pages."""

    def __init__(self, pools: dict[int, PoolMemory], memory: PoolMemory) -> None:
        self._pools = pools
        self._memory = memory

    async def connect(self, endpoint: TransferEndpoint, epoch: Epoch) -> None:
        """See `PagePuller.connect`."""
        self._pool(endpoint, epoch)

    async def pull(self, endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        """See `PagePuller.pull`."""
        for copy in copies:
            await asyncio.sleep(0)
            self._copy(self._pool(endpoint, epoch), copy)

    async def close(self) -> None:
        """Nothing is held."""

    def _pool(self, endpoint: TransferEndpoint, epoch: Epoch) -> PoolMemory:
        pool = self._pools.get(endpoint.port) if endpoint.host == _HOST else None
        if pool is None:
            raise PeerUnreachable(f"{endpoint.host}:{endpoint.port} is not there")
        if pool.header.epoch != epoch:
            raise PeerUnreachable(f"{endpoint.host}:{endpoint.port} has restarted")
        if pool.header.page_bytes != self._memory.header.page_bytes:
            raise IncompatiblePeer(f"{endpoint.host}:{endpoint.port} has pages of another size")
        return pool

    def _copy(self, pool: PoolMemory, copy: PageCopy) -> None:
        if copy.source >= pool.header.num_blocks or pool.generations[copy.source] != copy.generation:
            raise StalePage(f"page {copy.source} has been reused by its owner")
        self._memory.page(copy.target)[:] = pool.page(copy.source)
        if pool.generations[copy.source] != copy.generation:
            raise StalePage(f"page {copy.source} has been reused by its owner")
