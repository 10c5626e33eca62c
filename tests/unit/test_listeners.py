"""The sockets that clients connect to: every address of the host on one port, held until they are closed."""

import socket

import pytest

from common.errors import InvalidSetting, StartupError
from tandem.cluster.listeners import Listeners, listening


def test_any_port_is_one_and_a_client_is_not_refused() -> None:
    with listening("127.0.0.1", 0) as listeners:
        assert listeners.port > 0
        assert len(listeners.descriptors) == 1
        with socket.create_connection(("127.0.0.1", listeners.port), timeout=5):
            pass  # it waits in the backlog: nobody accepts here
        port = listeners.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_every_address_of_a_name_is_listened_on() -> None:
    with listening("localhost", 0) as listeners:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
        for address in addresses:
            with socket.create_connection((address, listeners.port), timeout=5):
                pass
        assert len(listeners.descriptors) == len(addresses)


def test_a_taken_port_and_a_foreign_address_are_refused() -> None:
    with listening("127.0.0.1", 0) as taken, pytest.raises(StartupError, match=r"is taken .*--port"):
        Listeners("127.0.0.1", taken.port)
    with pytest.raises(InvalidSetting, match="no address of this host"):
        Listeners("192.0.2.1", 0)


def test_a_port_is_free_again_at_once() -> None:
    with listening("127.0.0.1", 0) as listeners, socket.create_connection(("127.0.0.1", listeners.port), timeout=5):
        port = listeners.port
    with listening("127.0.0.1", port):
        pass
