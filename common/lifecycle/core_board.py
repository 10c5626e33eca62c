"""Which cores of a host are in use: a file that its workers map, so that one computes on what another leaves idle.

A number per core, written by the worker alone that the core belongs to: 0 while that has nothing to do. A worker that
is killed leaves its number behind, and nobody borrows its cores until its successor clears it.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

MAX_CORES = 1024
"""As many as a set of cores has in the system's calls."""

_NUMBER = ctypes.c_uint32


class CoreBoard:
    """See the module. `borrowed` are cores of others that this worker may compute on while they are idle."""

    def __init__(self, path: Path, own: Sequence[int], borrowed: Sequence[int]) -> None:
        assert all(0 <= core < MAX_CORES for core in (*own, *borrowed)), (own, borrowed)
        self.borrowed = tuple(borrowed)
        self._own = tuple(own)
        size = MAX_CORES * ctypes.sizeof(_NUMBER)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)  # as long as all make it; what it holds stays
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._numbers = (_NUMBER * MAX_CORES).from_buffer(self._memory)
        self.vacate()

    @property
    def address(self) -> int:
        """Where the numbers are, an uint32 per core; valid as long as the board lives."""
        return ctypes.addressof(self._numbers)

    def occupy(self) -> None:
        """Say that this worker uses its own cores; who has borrowed them leaves."""
        for core in self._own:
            self._numbers[core] = 1

    def vacate(self) -> None:
        """Say that this worker has nothing to do."""
        for core in self._own:
            self._numbers[core] = 0

    def is_in_use(self, core: int) -> bool:
        """Return whether the worker that `core` belongs to has something to do."""
        return self._numbers[core] != 0
