"""Accepts the connections of one page source and runs its server coroutine for each of them."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from common.errors import PeerError, PeerUnreachable
from common.transfer.connection import Connection

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
_ACCEPT_PAUSE_S = 0.1


class Listener:
    """Owns a listening socket and its connections. Whatever a peer sends can end its own connection only."""

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[Connection], Awaitable[None]],
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._serve = serve
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening, end every connection and wait until their server coroutines have ended."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._sock.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors, or a client that left while it was queued
                logger.warning("cannot accept a page connection: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= self._max_connections:
                logger.warning("refused a page connection: %d are open", len(self._connections))
                sock.close()
                continue
            task = asyncio.create_task(self._run(Connection(sock, _name_of(address))))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _run(self, connection: Connection) -> None:
        try:
            await self._serve(connection)
        except PeerUnreachable as error:  # it has hung up
            logger.debug("page connection closed: %s", error)
        except PeerError as error:
            logger.warning("page connection refused: %s", error)
        except TimeoutError:
            logger.warning("page connection closed: %s was too slow", connection.peer)
        except Exception:
            logger.exception("page connection of %s failed", connection.peer)
        finally:
            connection.close()


def _name_of(address: object) -> str:
    match address:
        case (host, port, *_):
            return f"{host}:{port}"
        case _:
            return "a local peer"
