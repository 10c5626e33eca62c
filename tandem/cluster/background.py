"""`up --detach`: the same command again as a process of its own, and the pipe through which it says how it goes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from tandem.cluster.child import last_line
from tandem.cluster.events import (
    Died,
    Draining,
    Failed,
    Left,
    Loading,
    Narrator,
    NotStarted,
    Ready,
    Restarted,
    events_from,
)
from tandem.cluster.state import StateDir
from tandem.cluster.topology import child_environment
from tandem.invocation import INVOCATION_VARIABLE, invocation

REPORT_VARIABLE = "TANDEM_REPORT_FD"
"""Tells the process in the background which descriptor to report to."""


def start_in_background(argv: Sequence[str], state_dir: StateDir, narrate: Narrator) -> int:
    """Start `tandem up` in a session of its own; return its exit code, 0 once the cluster is ready."""
    state_dir.create()
    log_file = state_dir.log_file("supervisor")
    with log_file.open("ab") as log:
        log_start = log.tell()
        reading, writing = os.pipe()
        supervisor = _spawn(argv, log.fileno(), writing)
        os.close(writing)
    try:
        for code in _until_settled(reading, narrate):
            return code
        narrate(_silent_death(supervisor, log_file, log_start))
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise
    return EXIT_FAILURE


def _spawn(argv: Sequence[str], log: int, report: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "tandem", "up", *argv, "--no-detach"),
        env={**child_environment(), REPORT_VARIABLE: str(report), INVOCATION_VARIABLE: invocation()},
        pass_fds=(report,),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _until_settled(report: int, narrate: Narrator) -> Iterator[int]:
    """Pass events on; yield the exit code that the last one means. Nothing is yielded if there was no last one."""
    for event in events_from(report):
        narrate(event)
        match event:
            case Ready():
                yield EXIT_OK
            case Failed():
                yield event.exit_code
            case Loading() | Died() | NotStarted() | Left() | Restarted() | Draining():
                pass


def _silent_death(supervisor: "subprocess.Popen[bytes]", log_file: Path, log_start: int) -> Failed:
    code = supervisor.wait()
    line = last_line(log_file, log_start) or f"exit code {code}"
    return Failed(f"the supervisor ended before the cluster was ready: {line} ({log_file})", EXIT_FAILURE)
