"""`tandem down`: stop the cluster of a state directory and leave nothing behind."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_OK
from common.settings.parse import parse
from common.settings.readers import boolean, number, path
from common.settings.setting import setting
from tandem.cluster.identity import ProcessRef, send_signal, wait_for_end
from tandem.cluster.state import DEFAULT_STATE_DIR, StateDir
from tandem.cluster.sweep import remove_leftovers
from tandem.console import notes, say

BETWEEN_SIGNALS_S = 0.3
"""Signals that follow each other at once arrive as one."""

HURRIED_END_S = 10.0
"""What a supervisor needs to kill its children and tidy up."""


@dataclass(frozen=True, kw_only=True)
class DownSettings:
    """Stop the cluster of a state directory: running requests finish first."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "folder that was given to `tandem up`", path)
    now: bool = setting(False, "end running requests instead of waiting for them", boolean)
    timeout_s: float = setting(120.0, "longest wait before running requests are ended", number(0), unit="seconds")


def run(argv: Sequence[str]) -> int:
    """Stop a cluster; a cluster that does not run is fine too."""
    settings = parse(DownSettings, argv, os.environ, "tandem down")
    state_dir = StateDir(settings.state_dir)
    state = state_dir.read_running()
    if state is not None:
        notes.print(f"stopping the cluster in {state_dir.path} ...")
        _stop(state.supervisor, BETWEEN_SIGNALS_S if settings.now else settings.timeout_s)
    _remove_leftovers(state_dir)
    say("stopped" if state is not None else f"no cluster runs in {state_dir.path}")
    return EXIT_OK


def _stop(supervisor: ProcessRef, patience_s: float) -> None:
    send_signal(supervisor, signal.SIGTERM)
    if wait_for_end(supervisor, patience_s):
        return
    send_signal(supervisor, signal.SIGTERM)  # the second signal: hurry
    if wait_for_end(supervisor, HURRIED_END_S):
        return
    send_signal(supervisor, signal.SIGKILL)
    if not wait_for_end(supervisor, HURRIED_END_S):
        raise StartupError(f"the supervisor (pid {supervisor.pid}) does not end")


def _remove_leftovers(state_dir: StateDir) -> None:
    if state_dir.path.is_dir():
        with state_dir.locked():
            remove_leftovers(state_dir)
