"""Listening sockets that somebody else has opened for a gateway: its supervisor, or systemd.

Their opener keeps them open while gateways come and go, so that a connection which finds no gateway waits for the next
one instead of being refused.
"""

import os
import socket
from collections.abc import Mapping, Sequence

from common.errors import InvalidSetting

FIRST_OF_SYSTEMD = 3
"""sd_listen_fds(3): descriptors are passed from this one upwards."""


def descriptors_of_systemd(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the descriptors of socket activation, none if they are not meant for this very process."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return ()
    count = environment.get("LISTEN_FDS", "")
    if not count.isdecimal():
        raise InvalidSetting("LISTEN_FDS", count, "must be a whole number")
    return tuple(range(FIRST_OF_SYSTEMD, FIRST_OF_SYSTEMD + int(count)))


def inherit(descriptors: Sequence[int]) -> list[socket.socket]:
    """Return the sockets behind inherited descriptors; raise `InvalidSetting` for one that does not listen."""
    return [_inherit(descriptor) for descriptor in descriptors]


def _inherit(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise InvalidSetting("listen_fds", descriptor, f"is no socket: {error.strerror}") from error
    if not _listens(listener):
        listener.close()
        raise InvalidSetting("listen_fds", descriptor, "is no TCP socket that listens")
    listener.set_inheritable(False)
    return listener


def _listens(listener: socket.socket) -> bool:
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    return is_tcp and bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
