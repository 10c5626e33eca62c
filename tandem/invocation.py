"""How this command was called, so that the commands we suggest work where they are read."""

import os
import shlex
import shutil
import sys
from pathlib import Path

COMMAND = "tandem"
INVOCATION_VARIABLE = "TANDEM_INVOCATION"
"""Carries the answer into the supervisor in the background, which is called in another way."""


def invocation() -> str:
    """Return what a shell needs to call us again: a path such as `.venv/bin/tandem`, or `tandem` if it is on PATH."""
    return os.environ.get(INVOCATION_VARIABLE) or _invocation_of(sys.argv[0])


def _invocation_of(program: str) -> str:
    is_path = os.sep in program and Path(program).name == COMMAND
    # The shell passes the full path also of what it found on PATH.
    if not is_path or shutil.which(COMMAND) == program:
        return COMMAND
    return shlex.quote(program)
