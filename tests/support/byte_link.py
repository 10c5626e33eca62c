"""A TCP proxy in front of one listener: Redis as one process sees it, a worker's pages, the way to a worker. It can be
frozen: as with a stopped process bytes are taken then, and nothing happens to them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.fault_partition import Partition

CHUNK_BYTES = 1 << 16


def _ignore(_: bytes) -> None:
    """Nobody looks."""


@dataclass(eq=False)
class ByteLink:
    """Hands bytes on, in both directions, later if told so. `owner`: whose listener it is.

    `look` makes, for each connection, what sees all that its client sends before it is handed on. Without a `partition`
    nobody is cut off from the owner.
    """

    owner: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    """0 until it listens, if the system is to choose it."""
    target_port: int = 0
    partition: Partition | None = None
    look: Callable[[], Callable[[bytes], None]] = lambda: _ignore
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.mistakes: list[BaseException] = []
        """What went wrong in the harness itself."""

    async def start(self, target_port: int | None = None) -> int:
        """Listen, in front of another port than was said if one is given; return the own port."""
        self.target_port = self.target_port if target_port is None else target_port
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        self.heal()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def hold(self) -> None:
        """Black hole: accept and hand on nothing."""
        self._flowing.clear()

    def heal(self) -> None:
        """Hand on everything at once, what was held too."""
        self.delay_s = 0.0
        self._flowing.set()

    def cut(self) -> None:
        """Drop every connection."""
        for connection in self._connections:
            connection.cancel()

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
        port = int(writer.get_extra_info("peername")[1])
        await self._may_pass(port)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, port, self.look())),
            asyncio.create_task(self._pump(far_reader, writer, port, _ignore)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for result in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError):
                    self.mistakes.append(result)
            far_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, look: Callable[[bytes], None]
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            look(chunk)
            await self._may_pass(port)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)  # the fault itself, not a wait for something
            writer.write(chunk)
            await writer.drain()

    async def _may_pass(self, port: int) -> None:
        await self._flowing.wait()
        if self.partition is not None:
            await self.partition.passage(self.owner, port)
