"""A TCP proxy that hands every byte on later, so that tests can act while an answer is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DelayProxy:
    """Forwards connections to a port of this host; each direction takes `delay_s`."""

    def __init__(self, target_port: int, delay_s: float) -> None:
        self._target_port = target_port
        self._delay_s = delay_s
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.num_connections = 0
        """Connections accepted so far."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    def cut(self) -> None:
        """Close every connection now."""
        for writer in self._writers:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while chunk := await reader.read(1 << 16):
                loop.call_later(self._delay_s, writer.write, chunk)
        except ConnectionError:
            pass
        loop.call_later(self._delay_s, writer.close)


@asynccontextmanager
async def delayed(target_port: int, delay_s: float) -> AsyncIterator[DelayProxy]:
    """Run a proxy in front of a port."""
    proxy = DelayProxy(target_port, delay_s)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
