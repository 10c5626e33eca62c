"""Pulls pages of one peer over TCP, straight into our own pool."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from common.errors import MalformedRecord, PeerUnreachable, StalePage
from common.messages.ids import Epoch
from common.transfer import page_frames
from common.transfer.connection import Connection, tune_tcp
from common.transfer.copy_thread import run_to_end
from common.transfer.handshake import HANDSHAKE_TIMEOUT_S, Secret, Transport, introduce
from common.transfer.page_frames import PageRef, Status
from common.transfer.pool_memory import PoolMemory
from common.transfer.protocols import PageCopy
from common.transfer.runs import spans_of

_STALL_S = 10.0
_MAX_IDLE = 4


class TcpPeer:
    """The connections to one incarnation of a peer. A pull has one for itself, so pulls never wait for each other.

    A pull that fails or is cancelled closes its connection: what is still in it belongs to nobody.
    """

    transport = Transport.TCP

    def __init__(
        self, host: str, port: int, epoch: Epoch, secret: Secret, memory: PoolMemory, executor: Executor
    ) -> None:
        self._address = (host, port)
        self._epoch = epoch
        self._secret = secret
        self._memory = memory
        self._executor = executor
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._is_closed = False

    @classmethod
    async def open(
        cls, host: str, port: int, epoch: Epoch, secret: Secret, memory: PoolMemory, executor: Executor
    ) -> "TcpPeer":
        """Connect and authenticate; raises `PeerUnreachable` or `IncompatiblePeer`."""
        peer = cls(host, port, epoch, secret, memory, executor)
        peer._idle.append(await peer._connect())
        return peer

    @property
    def is_open(self) -> bool:
        """Whether the peer lives, as far as is known."""
        return not self._is_closed

    async def pull(self, copies: Sequence[PageCopy]) -> None:
        """See `PagePuller.pull`."""
        connection = await self._take()
        self._busy.add(connection)
        is_reusable = False
        try:
            fetch = partial(self._fetch, connection, copies)
            is_fresh = await run_to_end(self._executor, fetch, connection.shut_down)
            is_reusable = not self._is_closed and len(self._idle) < _MAX_IDLE
        finally:
            self._busy.discard(connection)
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        if not is_fresh:
            raise StalePage(f"a page of {connection.peer} has been reused by its owner")

    async def close(self) -> None:
        """Drop every connection; pulls that use one fail."""
        self._is_closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        for connection in self._busy:
            connection.shut_down()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection.sock):
                return connection
            connection.close()
        return await self._connect()

    async def _connect(self) -> Connection:
        host, port = self._address
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                return await self._authenticated(host, port)
        except (OSError, TimeoutError) as error:
            raise PeerUnreachable(f"{host}:{port}: {error or 'timed out'}") from error

    async def _authenticated(self, host: str, port: int) -> Connection:
        loop = asyncio.get_running_loop()
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        connection = Connection(socket.socket(family, socket.SOCK_STREAM), f"{host}:{port}")
        try:
            tune_tcp(connection.sock)
            await loop.sock_connect(connection.sock, address)
            page_bytes = self._memory.header.page_bytes
            await introduce(connection, self._secret, Transport.TCP, self._epoch, page_bytes)
            connection.make_blocking(_STALL_S)
        except BaseException:
            connection.close()
            raise
        return connection

    def _fetch(self, connection: Connection, copies: Sequence[PageCopy]) -> bool:
        """Receive every page; return whether all were current. Runs in a thread."""
        batches = (copies[i : i + page_frames.MAX_PAGES] for i in range(0, len(copies), page_frames.MAX_PAGES))
        try:
            return all(self._fetch_batch(connection.sock, batch) for batch in batches)
        except BlockingIOError as error:
            raise PeerUnreachable(f"{connection.peer} sent nothing for {_STALL_S:.0f} s") from error
        except (OSError, EOFError, MalformedRecord) as error:
            raise PeerUnreachable(f"{connection.peer}: {error}") from error

    def _fetch_batch(self, sock: socket.socket, copies: Sequence[PageCopy]) -> bool:
        pages = [PageRef(copy.source, copy.generation) for copy in copies]
        sock.sendall(page_frames.pack_request(self._epoch, pages))
        status = page_frames.unpack_reply(_receive(sock, page_frames.REPLY_BYTES), len(pages))
        if status is Status.STALE:
            return False
        for first, num_pages in spans_of([copy.target for copy in copies], page_frames.MAX_PAGES):
            _receive_into(sock, self._memory.span(first, num_pages))
        tail = _receive(sock, len(pages) * page_frames.GENERATION_BYTES)
        return page_frames.unpack_generations(tail) == [ref.generation for ref in pages]


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive_into(sock, memoryview(data))
    return bytes(data)


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. One system call for a whole span, so that the thread asks for the GIL once, not per packet."""
    while view.nbytes:
        received = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if received == 0:
            raise EOFError("closed the connection")
        view = view[received:]


def _is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is still open: nothing is to be read from it, not even its end."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
