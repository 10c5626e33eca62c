"""Bytes that no listener of ours should survive badly, and the client that sends them."""

import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path


class MarkerFile:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


def hostile_payloads(marker: Path) -> dict[str, bytes]:
    """Return what to send; `marker` must not exist afterwards."""
    return {
        "pickle": pickle.dumps(MarkerFile(marker)),
        "msgpack ext": b"\xc9\x00\x00\x00\x10\x05" + bytes(16),
        "length prefix 2^31": struct.pack("<I", 2**31) + struct.pack(">I", 2**31) + bytes(256),
        "deep arrays": b"\x91" * 100_000,
        "wrong magic": b"tandemXX" + bytes(80),
        "random": os.urandom(100_000),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200),
    }


def finish(sock: socket.socket, payload: bytes, *, half_close: bool) -> None:
    """Send, then read until the other side ends the connection; fails by a timeout if it does not."""
    with sock:
        try:
            sock.sendall(payload)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except TimeoutError:
            raise
        except OSError:  # the other side has ended it with a reset
            return
