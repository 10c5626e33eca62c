"""The memory of one KV pool, made by its owner: the only process that ever writes into it.

An anonymous sealed file (memfd): it has no name that could leak, vanishes with its last holder, cannot be resized
under a peer that maps it, and no peer can map it writable. Machine pages are allocated when they are first touched.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import Iterator

from common.cache.layout import KVLayout
from common.errors import InsufficientMemory, InvalidSetting
from common.messages.ids import BlockId, Epoch
from common.transfer.pool_header import PoolHeader

_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, Linux 5.1; the standard library does not name it yet


def is_shared_memory_supported() -> bool:
    """Whether pages may be pulled through shared memory here.

    Reading a generation, copying, and reading it again is only sound where loads stay in order: on x86.
    """
    return sys.platform == "linux" and hasattr(os, "memfd_create") and platform.machine() in {"x86_64", "AMD64"}


class PoolMemory:
    """Generations and pages of one pool. Owned by the worker; the engine writes, page sources read.

    `generations` (format "Q", one per block) and `pages` (bytes, `num_blocks * page_bytes`) are writable views. The
    owner changes a block's generation before it reuses the page. The fence that must lie in between is the release of
    the GIL with which every tensor operator begins: a locked instruction, which x86 makes a full fence.
    """

    def __init__(self, header: PoolHeader, mapping: mmap.mmap, fd: int | None) -> None:
        self.header = header
        self._fd = fd
        whole = memoryview(mapping)
        self.generations: memoryview = whole[header.generations_slice].cast("Q")
        self.pages: memoryview = whole[header.pages_slice]

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, epoch: Epoch) -> "PoolMemory":
        """Return a pool of `num_blocks` pages with all generations 0; raises `InsufficientMemory`, `InvalidSetting`."""
        if num_blocks < 1:
            raise InvalidSetting("num_blocks", num_blocks, "a pool needs at least one block")
        header = PoolHeader(epoch, layout.page_bytes, num_blocks)
        fd = _sealed_file(header.total_bytes) if is_shared_memory_supported() else None
        try:
            mapping = mmap.mmap(-1 if fd is None else fd, header.total_bytes)
            mapping[: len(header.pack())] = header.pack()
            if fd is not None:
                _seal(fd)
        except (OSError, OverflowError) as error:
            if fd is not None:
                os.close(fd)
            raise InsufficientMemory(f"cannot map {header.total_bytes} bytes for the KV pool: {error}") from error
        return cls(header, mapping, fd)

    @property
    def is_shareable(self) -> bool:
        """Whether peers on this host can map the pool."""
        return self._fd is not None

    def page(self, block: BlockId) -> memoryview:
        """Return the writable bytes of one page."""
        return self.span(block, 1)

    def span(self, first: BlockId, num_pages: int) -> memoryview:
        """Return the writable bytes of consecutive pages."""
        assert 0 <= first <= first + num_pages <= self.header.num_blocks
        page_bytes = self.header.page_bytes
        return self.pages[first * page_bytes : (first + num_pages) * page_bytes]

    @contextlib.contextmanager
    def read_only_file(self) -> Iterator[int]:
        """Lend a read-only descriptor of the memory, to be passed to a peer."""
        assert self._fd is not None, "only shareable memory is a file"
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the memory. It is unmapped when nobody refers to a view of it any more.

        It is not unmapped by force: a tensor made with `torch.frombuffer` refers to the view, but does not lock it.
        """
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self.generations = self.pages = memoryview(b"")


def _sealed_file(num_bytes: int) -> int:
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise InsufficientMemory(f"cannot reserve {num_bytes} bytes for the KV pool: {error}") from error
    return fd


def _seal(fd: int) -> None:
    """Fix the size, and forbid new writable mappings; ours exists already and stays writable."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know this seal: peers still get it read-only
            raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
