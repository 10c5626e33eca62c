"""Serves a pool's pages to pullers on other hosts over TCP."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from common.errors import InvalidSetting, MalformedRecord, PeerUnreachable
from common.messages.registry import TransferEndpoint
from common.transfer import page_frames
from common.transfer.connection import Connection, tune_tcp
from common.transfer.copy_thread import run_to_end
from common.transfer.handshake import HANDSHAKE_TIMEOUT_S, Secret, Transport, welcome
from common.transfer.host import host_id
from common.transfer.listener import MAX_CONNECTIONS, Listener
from common.transfer.page_frames import PageRef, Status
from common.transfer.pool_memory import PoolMemory
from common.transfer.runs import spans_of

_STALL_S = 10.0
_MAX_PIECE_BYTES = 4 << 20
"""A puller that does not take this much within `_STALL_S` is dropped."""


class TcpSource:
    """Implements `PageSource`. Requests wait on the event loop; pages are sent by a thread, straight from the pool.

    The pages are held by whoever announced them (a lease); should the lease end under a transfer, the generations
    that follow the bytes tell the puller.
    """

    def __init__(self, memory: PoolMemory, secret: str, host: str, port: int = 0, advertised_host: str = "") -> None:
        self._memory = memory
        self._secret = Secret.of(secret)
        self._address = (host, port)
        self._advertised_host = advertised_host or host
        if _is_wildcard(self._advertised_host):
            raise InvalidSetting("advertised_host", self._advertised_host, f"peers cannot connect to it; bound: {host}")
        self._listener: Listener | None = None
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="page-server")

    async def start(self) -> TransferEndpoint:
        """Listen; raise `InvalidSetting` if the address cannot be bound."""
        assert self._listener is None
        sock = await asyncio.to_thread(_listen, *self._address)
        self._listener = Listener(sock, self._serve)
        return TransferEndpoint(host=self._advertised_host, port=sock.getsockname()[1], host_id=host_id())

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        self._threads.shutdown(wait=False)

    async def _serve(self, connection: Connection) -> None:
        tune_tcp(connection.sock)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await welcome(connection, self._secret, Transport.TCP, self._memory.header)
        while True:
            pages = await self._request(connection)
            answer = partial(self._answer, connection, pages)
            await run_to_end(self._threads, answer, connection.shut_down)

    async def _request(self, connection: Connection) -> list[PageRef]:
        request = page_frames.unpack_request(await connection.receive(page_frames.REQUEST_BYTES))
        if request.epoch != self._memory.header.epoch:
            raise MalformedRecord("page request", "for another epoch than its connection")
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            body = await connection.receive(request.num_pages * page_frames.PAGE_BYTES)
        pages = page_frames.unpack_pages(body)
        if any(ref.page >= self._memory.header.num_blocks for ref in pages):
            raise MalformedRecord("page request", "a page beyond the pool")
        return pages

    def _answer(self, connection: Connection, pages: Sequence[PageRef]) -> None:
        """Runs in a thread."""
        sock = connection.sock
        sock.settimeout(_STALL_S)
        try:
            if any(self._memory.generations[ref.page] != ref.generation for ref in pages):
                sock.sendall(page_frames.pack_reply(Status.STALE, len(pages)))
            else:
                self._send_pages(sock, pages)
        except OSError as error:
            raise PeerUnreachable(f"{connection.peer}: {error}") from error
        sock.setblocking(False)

    def _send_pages(self, sock: socket.socket, pages: Sequence[PageRef]) -> None:
        sock.sendall(page_frames.pack_reply(Status.PAGES, len(pages)))
        max_pages = max(1, _MAX_PIECE_BYTES // self._memory.header.page_bytes)
        for first, num_pages in spans_of([ref.page for ref in pages], max_pages):
            sock.sendall(self._memory.span(first, num_pages))
        sock.sendall(page_frames.pack_generations([self._memory.generations[ref.page] for ref in pages]))


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return not host


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, reuse_port=False)
    except (OSError, OverflowError) as error:
        raise InvalidSetting("transfer address", f"{host}:{port}", str(error)) from error
