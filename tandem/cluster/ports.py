"""TCP ports of this host: whether one can be had, any that is free, and who could reach it."""

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidSetting, StartupError


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a host name. `location` is the sockaddr, whose second part is the port."""

    family: int
    location: tuple[Any, ...]


def free_port(host: str) -> int:
    """Return a port that is free now; whoever binds it first gets it."""
    with bound_socket(host, addresses_of(host)[0], 0) as listener:
        return int(listener.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Return whether a listener on `host`, which is an address of this host, is out of reach for other hosts."""
    return all(ipaddress.ip_address(address.location[0]).is_loopback for address in addresses_of(host))


def addresses_of(host: str) -> list[Address]:
    """Return the addresses to listen on for `host`, each once; raise `InvalidSetting` if it is none of this host."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidSetting("host", host, "is no address of this host") from error
    return list(dict.fromkeys(Address(family, location) for family, *_, location in found))


def bound_socket(
    host: str, address: Address, port: int, backlog: int | None = None, *, flag: str = "--port"
) -> socket.socket:
    """Return a socket on `address`, listening if `backlog` is given; raise `StartupError` if it cannot be had.

    `flag` is where the user has chosen the port.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # An address whose last connections still fade away (TIME_WAIT) can be taken again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address.location[0], port, *address.location[2:]))
        if backlog is not None:
            listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, flag, error) from error
    return listener


def _refusal(host: str, port: int, flag: str, error: OSError) -> StartupError:
    match error.errno:
        case errno.EADDRINUSE:
            return StartupError(f"port {port} on {host} is taken (choose another one with {flag})")
        case errno.EACCES:
            return InvalidSetting("port", port, "needs more privileges")
        case errno.EADDRNOTAVAIL:
            return InvalidSetting("host", host, "is no address of this host")
        case _:
            return InvalidSetting("port", port, error.strerror or "cannot be bound")
