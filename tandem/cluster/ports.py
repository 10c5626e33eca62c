"""TCP ports of this host: whether one can be had, any that is free, and who could reach it."""

import errno
import ipaddress
import socket

from common.errors import InvalidSetting, StartupError


def free_port(host: str) -> int:
    """Return a port that is free now; whoever binds it first gets it."""
    with _socket_for(host, 0) as listener:
        return int(listener.getsockname()[1])


def require_port(host: str, port: int) -> None:
    """Raise `StartupError` if nobody could listen there."""
    _socket_for(host, port).close()


def is_loopback(host: str) -> bool:
    """Return whether a listener on `host`, which is an address of this host, is out of reach for other hosts."""
    addresses = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _socket_for(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidSetting("host", host, "is no address of this host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # As the gateway does: an address whose last connections still fade away (TIME_WAIT) can be taken again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if port:
            listener.listen(1)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> StartupError:
    match error.errno:
        case errno.EADDRINUSE:
            return StartupError(f"port {port} on {host} is taken (choose another one with --port)")
        case errno.EACCES:
            return InvalidSetting("port", port, "needs more privileges")
        case errno.EADDRNOTAVAIL:
            return InvalidSetting("host", host, "is no address of this host")
        case _:
            return InvalidSetting("port", port, error.strerror or "cannot be bound")
