"""The way to a worker that can be frozen: as with a stopped process, bytes are taken and nothing happens to them."""

import asyncio


class FreezableLink:
    """A TCP proxy on a port of its own."""

    def __init__(self) -> None:
        self._is_flowing = asyncio.Event()
        self._is_flowing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._target_port = 0

    async def start(self, target_port: int) -> int:
        """Listen in front of a port of this host; return our own."""
        self._target_port = target_port
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def freeze(self) -> None:
        """Hand nothing on."""
        self._is_flowing.clear()

    def thaw(self) -> None:
        """Hand on everything, what came meanwhile first."""
        self._is_flowing.set()

    def cut(self) -> None:
        """Drop every connection, with what it holds."""
        for connection in self._connections:
            connection.cancel()

    async def close(self) -> None:
        """Stop listening, too."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # either side is gone, or we were told to cut
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            await self._is_flowing.wait()
            writer.write(chunk)
