"""The library of native kernels that fits this machine, opened once per process.

Its functions are called through ctypes, which lets other Python threads run meanwhile.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass

from kernels.native.compiler import InstructionSet, library_path, runnable_sets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """`functions` has an attribute per exported function; types of arguments are declared where they are called."""

    isa: str
    functions: ctypes.CDLL


@functools.cache
def native_library() -> Library | None:
    """Return the best library that is built and runs here; None, and one line in the log, if there is none."""
    runnable = runnable_sets()
    for isa in runnable:
        opened = open_library(isa)
        if opened is not None:
            if isa is not runnable[0]:
                logger.warning("native kernels for %s are not built, using those for %s", runnable[0].name, isa.name)
            return opened
    reason = "not built (python -m kernels.native.compiler)" if runnable else "made for x86-64 with AVX2 on Linux"
    logger.warning("computing with torch's operators: the native kernels are %s", reason)
    return None


def open_library(isa: InstructionSet) -> Library | None:
    """Return the library of one instruction set, None if it is not built for the present sources."""
    path = library_path(isa)
    return Library(isa.name, ctypes.CDLL(str(path))) if path.exists() else None
