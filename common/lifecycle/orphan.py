"""Children that die with their supervisor, also when it is killed: Linux tells the kernel, once, in the child itself.

Run as a script it is a trampoline for programs that know nothing of this, such as Redis: it arms the kernel and then
becomes the program, under the same pid:

    python -I -S orphan.py <pid of the parent> <program> <argument>...

The script uses the standard library alone, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send `number` when the parent dies; return whether the parent still lives.

    The parent may have died before the kernel was told: then this process has another parent by now, and nothing will
    ever be sent. Outside Linux only that check is made.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def command_under(parent: int, command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line that runs `command` so that it dies with the process `parent`."""
    return (sys.executable, "-I", "-S", __file__, str(parent), *command)


if __name__ == "__main__":
    if not die_with_parent(int(sys.argv[1])):
        sys.exit("the parent has died")
    os.execvp(sys.argv[2], sys.argv[2:])
