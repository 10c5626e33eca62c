"""Teams of threads for native kernels (team.h), as Python sees them."""

import ctypes
import functools
import weakref

from kernels.native.library import Library


class Team:
    """Threads that compute one call together; the caller's is one of them. One call at a time.

    The others start with the first call, with the niceness and cores of the thread that makes it, and sleep between
    calls.
    """

    def __init__(self, library: Library, num_threads: int, max_phases: int = 16) -> None:
        assert num_threads >= 1, num_threads
        self.library = library
        self.num_threads = num_threads
        functions = library.functions
        functions.tandem_team_new.restype = ctypes.c_void_p
        functions.tandem_team_new.argtypes = [ctypes.c_int32, ctypes.c_int32]
        functions.tandem_team_delete.argtypes = [ctypes.c_void_p]
        functions.tandem_team_delete.restype = None
        self.handle: int = functions.tandem_team_new(num_threads, max_phases)
        """For functions that take a team."""
        self._finalizer = weakref.finalize(self, functions.tandem_team_delete, self.handle)

    def close(self) -> None:
        """End the threads; idempotent."""
        self._finalizer()


@functools.cache
def shared_team(library: Library, num_threads: int) -> Team:
    """Return the process's team of this size, for callers that take turns."""
    return Team(library, num_threads)
