"""Hands a pool's memory to pullers on the same host, read-only, over a unix socket."""

import asyncio
import socket
from pathlib import Path

from common.errors import InvalidSetting
from common.messages.registry import TransferEndpoint
from common.transfer.connection import Connection
from common.transfer.handshake import HANDSHAKE_TIMEOUT_S, Secret, Transport, welcome
from common.transfer.host import host_id
from common.transfer.listener import Listener
from common.transfer.pool_memory import PoolMemory

_MAX_PATH_BYTES = 103  # sun_path holds 104 bytes on macOS, 108 on Linux, a zero included


class SharedMemorySource:
    """Implements `PageSource`. The open connection tells the puller that the pool's owner is alive."""

    def __init__(self, memory: PoolMemory, secret: str, path: Path) -> None:
        if len(bytes(path)) > _MAX_PATH_BYTES:
            raise InvalidSetting("transfer socket", str(path), f"longer than {_MAX_PATH_BYTES} bytes")
        self._memory = memory
        self._secret = Secret.of(secret)
        self._path = path
        self._listener: Listener | None = None

    async def start(self) -> TransferEndpoint:
        """Listen at the path; raise `InvalidSetting` if that is impossible."""
        assert self._listener is None
        self._listener = Listener(_listen(self._path), self._serve)
        return TransferEndpoint(host="", port=0, host_id=host_id(), socket=str(self._path))

    async def close(self) -> None:
        """Stop listening, remove the socket, drop every connection."""
        if self._listener is None:
            return
        self._path.unlink(missing_ok=True)
        await self._listener.close()
        self._listener = None

    async def _serve(self, connection: Connection) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await welcome(connection, self._secret, Transport.SHARED_MEMORY, self._memory.header)
        with self._memory.read_only_file() as fd:
            connection.send_descriptor(fd)
        await connection.receive(1)  # until the puller hangs up: it has nothing more to say


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_socket():  # left behind by an earlier owner of this seat
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)  # before anybody can connect
        sock.listen()
    except OSError as error:
        sock.close()
        raise InvalidSetting("transfer socket", str(path), error.strerror or str(error)) from error
    return sock
