"""A peer's pool as we see it through shared memory: mapped read-only, checked before it is believed."""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from common.errors import IncompatiblePeer, MalformedRecord
from common.transfer.pool_header import GENERATIONS_OFFSET, PoolHeader


class MappedPool:
    """Read-only `generations` [num_blocks] uint64 and `pages` [num_blocks * page_bytes] uint8 of a peer.

    It has no `close`: the mapping ends with the last reference, so a running copy can never lose it.
    """

    def __init__(self, header: PoolHeader, mapping: mmap.mmap) -> None:
        self.header = header
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            mapping, np.uint64, count=header.num_blocks, offset=GENERATIONS_OFFSET
        )
        self.pages: npt.NDArray[np.uint8] = np.frombuffer(
            mapping, np.uint8, count=header.num_blocks * header.page_bytes, offset=header.pages_offset
        )

    @classmethod
    def open(cls, fd: int, expected: PoolHeader) -> "MappedPool":
        """Map the file `fd` (which stays the caller's); raise `IncompatiblePeer` if it is not the `expected` pool."""
        try:
            # Without this seal a peer could shrink the file, and our next read would be a fatal signal.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise IncompatiblePeer("the peer's shared memory is not sealed")
            if os.fstat(fd).st_size != expected.total_bytes:
                raise IncompatiblePeer("the peer's shared memory has another size than it should")
            mapping = mmap.mmap(fd, expected.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            if PoolHeader.unpack(mapping[:GENERATIONS_OFFSET]) != expected:
                raise IncompatiblePeer("the peer's shared memory belongs to another pool")
        except (OSError, ValueError, MalformedRecord) as error:
            raise IncompatiblePeer(f"the peer's shared memory cannot be used: {error}") from error
        return cls(expected, mapping)
