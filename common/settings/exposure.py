"""Whether a listener can be reached from other hosts."""

import ipaddress
import socket


def reaches_others(host: str) -> bool:
    """Return whether a listener on `host` would be in reach of other hosts; False also for what is no address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return False  # whoever listens there says what is wrong with it
    return not all(ipaddress.ip_address(location[0]).is_loopback for *_, location in found)
