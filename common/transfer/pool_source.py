"""Everything that a worker offers to pullers of its pool, as one page source."""

import asyncio
from pathlib import Path

import msgspec

from common.messages.registry import TransferEndpoint
from common.transfer.pool_memory import PoolMemory
from common.transfer.shm_source import SharedMemorySource
from common.transfer.tcp_source import TcpSource


class PoolSource:
    """Implements `PageSource`: TCP always, shared memory where the pool is shareable and a socket path is given."""

    def __init__(
        self,
        memory: PoolMemory,
        secret: str,
        host: str,
        port: int = 0,
        *,
        advertised_host: str = "",
        socket: Path | None = None,
    ) -> None:
        self._tcp = TcpSource(memory, secret, host, port, advertised_host)
        self._shared = SharedMemorySource(memory, secret, socket) if socket and memory.is_shareable else None

    async def start(self) -> TransferEndpoint:
        """Listen everywhere; return the joint endpoint. Raises `InvalidSetting`."""
        endpoint = await self._tcp.start()
        if self._shared is None:
            return endpoint
        try:
            shared = await self._shared.start()
        except BaseException:
            await self._tcp.close()
            raise
        return msgspec.structs.replace(endpoint, socket=shared.socket)

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        await asyncio.gather(self._tcp.close(), *([self._shared.close()] if self._shared else []))
