"""One copy of a model's prepared weights per host: a file in shared memory that its first user fills and all map.

Life of the file `tandem-weights-<user>-<name>`:

1. Whoever finds nobody using it (an exclusive lock) fills it, unless it is complete already, and then shares the lock.
2. Others wait meanwhile, see how far it is, and map it when it is complete. A filler that dies leaves its lock to one
   of them, who begins anew: what a torn file holds is never used.
3. Every user keeps a shared lock; the last one that leaves removes the file. What users left that were killed is taken
   over by the next start with the same weights; any start removes the files that nobody uses.

The kernel drops the locks of a process however it ends. Where files cannot be shared (no room, no such folder, a
stranger's file of that name) a worker has its weights to itself.
"""

import errno
import fcntl
import logging
import os
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.model.huge_mapping import Mapping, map_private, map_shared, protect

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
HEADER_BYTES = 4096
"""The numbers begin on a page of their own."""

PATIENCE_S = 30.0
"""A filler without progress for so long is stopped or stuck; its neighbours then do without it."""

_POLL_S = 0.05
_PREFIX = "tandem-weights-"
_VERSION = 1
_HEADER = struct.Struct("<16sI32sQ")  # magic, version, digest of the name, bytes behind the header
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"tandem weights\0\0"
_PROGRESS = struct.Struct("<d")
_PROGRESS_OFFSET = 512

Report = Callable[[float], None]
"""Takes the fraction that is done, from 0 to 1."""

Fill = Callable[[memoryview, Report], None]
"""Writes all numbers; it is given zeros."""


class WeightMemory:
    """`memory` holds the numbers; read-only. It stays mapped as long as anything refers to it."""

    def __init__(self, memory: Mapping, path: Path | None = None, fd: int | None = None) -> None:
        self.memory = memory
        self.is_shared = fd is not None
        """Whether other processes use the same memory."""
        self._leave = None if path is None or fd is None else weakref.finalize(self, _leave, path, fd)

    def close(self) -> None:
        """Say that this process no longer uses the file; the last one removes it. Idempotent."""
        if self._leave is not None:
            self._leave()


def obtain_weights(
    name: str, num_bytes: int, fill: Fill, on_progress: Report, folder: Path = SHARED_MEMORY
) -> WeightMemory:
    """Return `num_bytes` bytes filled by `fill`, in this process or in another that gave the same `name`.

    `name` must differ when the content does. What `fill` raises is raised here, and nothing of it is left.
    """
    remove_unused(folder, keep=_path(folder, name))
    try:
        return _obtain_shared(name, num_bytes, fill, on_progress, folder)
    except _Unfilled as error:
        raise error.reason from None
    except OSError as error:
        logger.warning("this worker has its weights to itself: %s", error)
    return own_weights(num_bytes, fill, on_progress)


def own_weights(num_bytes: int, fill: Fill, on_progress: Report) -> WeightMemory:
    """Return `num_bytes` bytes filled by `fill`, for this process alone."""
    memory = map_private(num_bytes)
    fill(memoryview(memory).cast("B"), on_progress)
    protect(memory)
    return WeightMemory(memory)


def remove_unused(folder: Path = SHARED_MEMORY, keep: Path | None = None) -> None:
    """Remove the weights of this user that no process uses, except `keep`."""
    for path in folder.glob(f"{_PREFIX}{os.geteuid()}-*"):
        if path == keep:
            continue
        with suppress(OSError):
            _leave(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))


class _Unfilled(Exception):
    """Carries what `fill` raised past those who handle errors of the file."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _path(folder: Path, name: str) -> Path:
    return folder / f"{_PREFIX}{os.geteuid()}-{name}"


def _obtain_shared(name: str, num_bytes: int, fill: Fill, on_progress: Report, folder: Path) -> WeightMemory:
    path, header = _path(folder, name), _header(name, num_bytes)
    patience = _Patience()
    while True:
        fd = _open(path)
        try:
            found = _take(path, fd, header, num_bytes, fill, on_progress)
        except BaseException:
            os.close(fd)
            raise
        if found is not None:
            return WeightMemory(found, path, fd)
        progress = _read_progress(fd)
        os.close(fd)
        patience.wait(progress)
        on_progress(progress)


def _take(path: Path, fd: int, header: bytes, num_bytes: int, fill: Fill, on_progress: Report) -> Mapping | None:
    """Return the complete weights, with a shared lock on `fd`; None if another process is filling them."""
    if _lock(fd, fcntl.LOCK_EX) and _is_at(path, fd) and not _is_complete(fd, header, num_bytes):
        try:
            _fill(fd, header, num_bytes, fill, on_progress)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    if _lock(fd, fcntl.LOCK_SH) and _is_at(path, fd) and _is_complete(fd, header, num_bytes):
        return map_shared(fd, HEADER_BYTES, num_bytes, is_writable=False)
    return None


def _fill(fd: int, header: bytes, num_bytes: int, fill: Fill, on_progress: Report) -> None:
    os.ftruncate(fd, 0)  # whatever a dead process left
    os.ftruncate(fd, HEADER_BYTES + num_bytes)
    mapping = map_shared(fd, HEADER_BYTES, num_bytes, is_writable=True)
    # Now, not by a signal in the middle of a copy, it shows whether there is room.
    os.posix_fallocate(fd, 0, HEADER_BYTES + num_bytes)

    def report(fraction: float) -> None:
        os.pwrite(fd, _PROGRESS.pack(fraction), _PROGRESS_OFFSET)
        on_progress(fraction)

    try:
        fill(memoryview(mapping).cast("B"), report)
    except Exception as error:
        raise _Unfilled(error) from error
    os.pwrite(fd, header, 0)


def _is_complete(fd: int, header: bytes, num_bytes: int) -> bool:
    return os.fstat(fd).st_size == HEADER_BYTES + num_bytes and os.pread(fd, len(header), 0) == header


def _header(name: str, num_bytes: int) -> bytes:
    assert len(name) <= 32, name
    packed = _HEADER.pack(_MAGIC, _VERSION, name.encode(), num_bytes)
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise OSError(errno.EPERM, "the file is not this user's alone", str(path))
    return fd


def _lock(fd: int, kind: int) -> bool:
    """Take the lock, or change the one that is held, without waiting; False if others are in the way."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file still has its name: between opening and locking it may have been removed."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_if_unused(path: Path, fd: int) -> None:
    if _lock(fd, fcntl.LOCK_EX) and _is_at(path, fd):
        path.unlink(missing_ok=True)


def _leave(path: Path, fd: int) -> None:
    try:
        _remove_if_unused(path, fd)
    finally:
        os.close(fd)


def _read_progress(fd: int) -> float:
    raw = os.pread(fd, _PROGRESS.size, _PROGRESS_OFFSET)
    return float(_PROGRESS.unpack(raw)[0]) if len(raw) == _PROGRESS.size else 0.0


class _Patience:
    """Waits for another process as long as it makes progress."""

    def __init__(self) -> None:
        self._progress = -1.0
        self._since = 0.0

    def wait(self, progress: float) -> None:
        """Wait a moment; raises `TimeoutError` when there was no progress for too long."""
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
        elif now - self._since > PATIENCE_S:
            raise TimeoutError(errno.ETIMEDOUT, "another worker prepares them and does not get on")
        time.sleep(_POLL_S)
