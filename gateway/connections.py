"""The connections of a gateway's clients: which of them serve a request now, and how all of them come to an end.

Owned by the gateway's event loop. A connection that is kept alive may carry a request at any moment, also one that its
client sent before it could know that this gateway leaves. So an idle one is not closed at once but after a quiet
moment, and what still arrives on it is served; its answer says `Connection: close`.
"""

import asyncio
import fcntl
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

LINGER_S = 1.0
"""How long a connection must have been quiet before a draining gateway closes it: clients that use it all the time have
sent their next request by then, and have been told by its answer."""

LOOK_S = 0.02


class Connections:
    """Which connections serve a request; `serving` surrounds every one of them."""

    def __init__(self) -> None:
        self._serving: set[web.RequestHandler] = set()
        self._quiet_since: dict[web.RequestHandler, float] = {}
        self._is_draining = False

    @contextmanager
    def serving(self, connection: web.RequestHandler) -> Iterator[None]:
        """Serve one request of a connection; HTTP/1 has one at a time."""
        self._serving.add(connection)
        try:
            yield
        finally:
            self._serving.discard(connection)
            if self._is_draining:
                self._quiet_since[connection] = asyncio.get_running_loop().time()

    async def drain(self, server: web.Server) -> None:
        """Return when no connection is open: close those that have been quiet for `LINGER_S`, wait for the others.

        Whoever calls has stopped accepting new ones.
        """
        self._is_draining = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        # Looked at only after a turn of the loop: the last connections have been accepted, but not yet made known.
        await asyncio.sleep(0)
        while server.connections:
            for connection in server.connections:
                quiet_s = loop.time() - self._quiet_since.get(connection, began_s)
                if quiet_s >= LINGER_S and connection not in self._serving and not _has_more(connection):
                    connection.force_close()
            await asyncio.sleep(LOOK_S)


def _has_more(connection: web.RequestHandler) -> bool:
    """Whether bytes of its client lie unread in the kernel, or bytes for it are still to be sent."""
    transport = connection.transport
    if transport is None or transport.is_closing():
        return False
    if transport.get_write_buffer_size():
        return True
    descriptor: int = transport.get_extra_info("socket").fileno()
    (num_unread,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return bool(num_unread)
