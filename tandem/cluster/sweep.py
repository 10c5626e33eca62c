"""Clears away what a supervisor left that had no time to do so itself: it was killed, or the power failed."""

import signal

from tandem.cluster.identity import send_signal
from tandem.cluster.state import StateDir


def remove_leftovers(state_dir: StateDir) -> None:
    """Kill processes that outlived their supervisor and remove its sockets.

    On Linux the kernel has ended them together with it. No process is touched that merely got one of their pids.
    """
    state = state_dir.read()
    if state is None:
        return
    for entry in state.processes:
        if entry.ref is not None:
            send_signal(entry.ref, signal.SIGKILL)
    state_dir.remove_run_dir(state_dir.path / state.run_dir)
    state_dir.forget()
