"""The sockets that clients connect to. The supervisor opens them once and lends them to every gateway.

They stay open while gateways come and go: a connection that finds no gateway accepting waits in the backlog for the
next one. Several gateways take their connections from the same backlog; an idle one wins over a busy one.
"""

import contextlib
import socket
from collections.abc import Iterator

from tandem.cluster.ports import addresses_of, bound_socket

BACKLOG = 1024
"""Connections that wait while no gateway accepts; the kernel may allow fewer (net.core.somaxconn)."""


class Listeners:
    """Listening sockets on every address that a host name has, all on one port."""

    def __init__(self, host: str, port: int) -> None:
        """Listen; 0 takes any free port. Raises `StartupError` naming what is wrong with host or port."""
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses_of(host):
                self._sockets.append(bound_socket(host, address, port if not self._sockets else self.port, BACKLOG))
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """Where clients connect."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What gateways inherit."""
        return tuple(listener.fileno() for listener in self._sockets)

    def close(self) -> None:
        """Take no more connections, once the gateways have left as well; a second time does nothing."""
        for listener in self._sockets:
            listener.close()


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[Listeners]:
    """Hold the sockets until the block is left."""
    listeners = Listeners(host, port)
    try:
        yield listeners
    finally:
        listeners.close()
