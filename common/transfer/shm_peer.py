"""Pulls pages of one peer on the same host straight out of its memory."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
import numpy.typing as npt

from common.errors import PeerUnreachable, StalePage
from common.messages.ids import Epoch
from common.transfer.connection import Connection
from common.transfer.copy_thread import run_to_end
from common.transfer.handshake import HANDSHAKE_TIMEOUT_S, Secret, Transport, introduce
from common.transfer.mapped_pool import MappedPool
from common.transfer.pool_header import PoolHeader
from common.transfer.pool_memory import PoolMemory, is_shared_memory_supported
from common.transfer.protocols import PageCopy
from common.transfer.runs import Run, runs_of

_MAX_RUN_BYTES = 8 << 20
"""A cancelled pull ends at the next run: about a millisecond of copying."""


class SharedMemoryPeer:
    """One mapped peer. The connection to it stays open only to show that it lives; its end drops the mapping."""

    transport = Transport.SHARED_MEMORY

    def __init__(self, connection: Connection, pool: MappedPool, memory: PoolMemory, executor: Executor) -> None:
        self._connection = connection
        self._pool: MappedPool | None = pool
        self._memory = memory
        self._executor = executor
        self._max_pages = max(1, _MAX_RUN_BYTES // memory.header.page_bytes)
        asyncio.get_running_loop().add_reader(connection.sock, self._hang_up)

    @classmethod
    async def open(
        cls, path: str, epoch: Epoch, secret: Secret, memory: PoolMemory, executor: Executor
    ) -> "SharedMemoryPeer":
        """Connect, authenticate and map; raises `PeerUnreachable` or `IncompatiblePeer`."""
        if not is_shared_memory_supported():
            raise PeerUnreachable("shared memory transfer needs Linux on x86-64")
        connection = Connection(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                pool = await _map(connection, path, epoch, secret, memory.header)
            return cls(connection, pool, memory, executor)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise PeerUnreachable(f"{path}: {error or 'timed out'}") from error
        except BaseException:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the peer lives, as far as is known."""
        return self._pool is not None

    async def pull(self, copies: Sequence[PageCopy]) -> None:
        """See `PagePuller.pull`."""
        if self._pool is None:
            raise PeerUnreachable(f"{self._connection.peer} is gone")
        is_interrupted = threading.Event()
        runs = list(runs_of(copies, self._max_pages))
        work = partial(_copy_runs, runs, self._pool, self._memory, is_interrupted)
        await run_to_end(self._executor, work, is_interrupted.set)

    async def close(self) -> None:
        """Hang up; running copies keep the mapping until they end."""
        self._hang_up()

    def _hang_up(self) -> None:
        if self._pool is None:
            return
        self._pool = None
        asyncio.get_running_loop().remove_reader(self._connection.sock)
        self._connection.close()


async def _map(connection: Connection, path: str, epoch: Epoch, secret: Secret, own: PoolHeader) -> MappedPool:
    await asyncio.get_running_loop().sock_connect(connection.sock, path)
    header = await introduce(connection, secret, Transport.SHARED_MEMORY, epoch, own.page_bytes)
    with await connection.receive_descriptor() as fd:
        return MappedPool.open(fd, header)


def _copy_runs(runs: Sequence[Run], pool: MappedPool, memory: PoolMemory, is_interrupted: threading.Event) -> None:
    targets = np.frombuffer(memory.pages, np.uint8)
    for run in runs:
        if is_interrupted.is_set():
            return
        _copy_run(run, pool, targets)


def _copy_run(run: Run, pool: MappedPool, targets: npt.NDArray[np.uint8]) -> None:
    """Check, copy, check. numpy copies without the GIL; taking it back is the fence before the second check."""
    if run.source + run.num_pages > pool.header.num_blocks:
        raise StalePage(f"page {run.source + run.num_pages - 1} is beyond the peer's pool")
    page_bytes = pool.header.page_bytes
    current = pool.generations[run.source : run.source + run.num_pages]
    expected = np.array(run.generations, np.uint64)
    _check(run, current, expected)
    source_start, target_start = run.source * page_bytes, run.target * page_bytes
    num_bytes = run.num_pages * page_bytes
    np.copyto(targets[target_start : target_start + num_bytes], pool.pages[source_start : source_start + num_bytes])
    _check(run, current, expected)


def _check(run: Run, current: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64]) -> None:
    if not np.array_equal(current, expected):
        raise StalePage(f"a page of {run.source}..{run.source + run.num_pages - 1} has been reused by its owner")
