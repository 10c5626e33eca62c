"""Pulls pages of any peer into our pool: through shared memory where that works, over TCP elsewhere."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from common.errors import PeerError, PeerUnreachable
from common.messages.ids import Epoch
from common.messages.registry import TransferEndpoint
from common.transfer.handshake import Secret, Transport
from common.transfer.pool_memory import PoolMemory, is_shared_memory_supported
from common.transfer.protocols import PageCopy
from common.transfer.shm_peer import SharedMemoryPeer
from common.transfer.tcp_peer import TcpPeer

logger = logging.getLogger(__name__)

TransferMode = Literal["auto", "shm", "tcp"]

_NUM_COPY_THREADS = 2
_NUM_TCP_THREADS = 32
"""They wait for the network most of the time; a pull beyond them waits for another one."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """A pull that succeeded."""

    transport: Transport
    num_bytes: int
    duration_s: float


class _Peer(Protocol):
    transport: Transport

    @property
    def is_open(self) -> bool: ...

    async def pull(self, copies: Sequence[PageCopy]) -> None: ...

    async def close(self) -> None: ...


_Key = tuple[TransferEndpoint, Epoch]


class Puller:
    """Implements `PagePuller`. Lives on one event loop; its threads write into `memory` only while a `pull` runs."""

    def __init__(
        self,
        memory: PoolMemory,
        secret: str,
        host_id: str,
        mode: TransferMode = "auto",
        on_pull: Callable[[PullReport], None] = lambda report: None,
    ) -> None:
        self._memory = memory
        self._secret = Secret.of(secret)
        self._host_id = host_id
        self._mode = mode
        self._on_pull = on_pull
        self._peers: dict[_Key, asyncio.Task[_Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._copy_threads = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="page-copy")
        self._tcp_threads = ThreadPoolExecutor(_NUM_TCP_THREADS, thread_name_prefix="page-tcp")

    async def connect(self, endpoint: TransferEndpoint, epoch: Epoch) -> None:
        """See `PagePuller.connect`."""
        await self._peer(endpoint, epoch)

    async def pull(self, endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        """See `PagePuller.pull`; raises `IncompatiblePeer` too, if the peer was never connected before."""
        if not copies:
            return
        started = time.perf_counter()
        peer = await self._peer(endpoint, epoch)
        try:
            await peer.pull(copies)
        except PeerUnreachable:
            self._forget((endpoint, epoch))
            raise
        num_bytes = len(copies) * self._memory.header.page_bytes
        self._on_pull(PullReport(peer.transport, num_bytes, time.perf_counter() - started))

    async def close(self) -> None:
        """Drop every connection and wait for our threads."""
        for key in list(self._peers):
            self._forget(key)
        await asyncio.gather(*self._closing, return_exceptions=True)
        for threads in (self._copy_threads, self._tcp_threads):
            await asyncio.to_thread(threads.shutdown)

    async def _peer(self, endpoint: TransferEndpoint, epoch: Epoch) -> _Peer:
        """Return the connected peer; callers who come together share one attempt to connect."""
        key = (endpoint, epoch)
        opening = self._peers.get(key)
        if opening is not None and _is_over(opening):
            self._forget(key)
            opening = None
        if opening is None:
            opening = asyncio.create_task(self._open(endpoint, epoch))
            self._peers[key] = opening
            opening.add_done_callback(partial(self._opened, key))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and not _is_caller_cancelled():
                raise PeerUnreachable(f"{endpoint.host}:{endpoint.port} was dropped while connecting") from None
            raise

    async def _open(self, endpoint: TransferEndpoint, epoch: Epoch) -> _Peer:
        match self._mode:
            case "shm":
                return await self._open_shared(endpoint, epoch)
            case "tcp":
                return await self._open_tcp(endpoint, epoch)
            case "auto":
                return await self._open_any(endpoint, epoch)

    async def _open_any(self, endpoint: TransferEndpoint, epoch: Epoch) -> _Peer:
        is_near = endpoint.socket is not None and endpoint.host_id != "" and endpoint.host_id == self._host_id
        if is_near and is_shared_memory_supported():
            try:
                return await self._open_shared(endpoint, epoch)
            except PeerError as error:
                logger.warning("no shared memory with %s:%d, using TCP: %s", endpoint.host, endpoint.port, error)
        return await self._open_tcp(endpoint, epoch)

    async def _open_shared(self, endpoint: TransferEndpoint, epoch: Epoch) -> _Peer:
        if endpoint.socket is None:
            raise PeerUnreachable(f"{endpoint.host}:{endpoint.port} offers no shared memory")
        if endpoint.host_id != self._host_id:
            raise PeerUnreachable(f"{endpoint.host}:{endpoint.port} is on another host: no shared memory with it")
        return await SharedMemoryPeer.open(endpoint.socket, epoch, self._secret, self._memory, self._copy_threads)

    async def _open_tcp(self, endpoint: TransferEndpoint, epoch: Epoch) -> _Peer:
        if endpoint.port == 0:
            raise PeerUnreachable(f"{endpoint.socket or 'the peer'} serves no pages over TCP")
        address = (endpoint.host, endpoint.port)
        return await TcpPeer.open(*address, epoch, self._secret, self._memory, self._tcp_threads)

    def _opened(self, key: _Key, opening: asyncio.Task[_Peer]) -> None:
        """A failed attempt is forgotten; a successful one ends all that is cached about older epochs there."""
        if opening.cancelled() or opening.exception() is not None:
            if self._peers.get(key) is opening:
                del self._peers[key]
            return
        endpoint, epoch = key
        for other in [other for other in self._peers if other[0] == endpoint and other[1] != epoch]:
            self._forget(other)

    def _forget(self, key: _Key) -> None:
        opening = self._peers.pop(key, None)
        if opening is None:
            return
        closing = asyncio.create_task(_close(opening))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _is_caller_cancelled() -> bool:
    caller = asyncio.current_task()
    return caller is not None and caller.cancelling() > 0


def _is_over(opening: "asyncio.Task[_Peer]") -> bool:
    """Whether the attempt has failed, or its peer has hung up since."""
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or not opening.result().is_open


async def _close(opening: "asyncio.Task[_Peer]") -> None:
    if not opening.done():
        opening.cancel()
    try:
        peer = await opening
    except (PeerError, asyncio.CancelledError):  # never opened; whoever waits for it gets the error
        return
    await peer.close()
