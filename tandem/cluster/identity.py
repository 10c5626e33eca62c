"""Names a process for good: a pid alone may belong to somebody else by the time a signal is sent."""

import os
import select
import signal
import sys
import time
from pathlib import Path

import msgspec
import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
POLL_INTERVAL_S = 0.05


class ProcessRef(msgspec.Struct, frozen=True):
    """A process by its pid and its start time; `started` is compared for equality only."""

    pid: int
    started: str


def ref_of(pid: int) -> ProcessRef | None:
    """Return the reference of a running process, None if there is none (a zombie is none)."""
    started = _started_linux(pid) if sys.platform == "linux" else _started_elsewhere(pid)
    return None if started is None else ProcessRef(pid, started)


def is_running(ref: ProcessRef) -> bool:
    """Return whether exactly this process still runs."""
    return ref_of(ref.pid) == ref


def send_signal(ref: ProcessRef, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; return whether it was there to receive it."""
    if not hasattr(os, "pidfd_open"):
        return is_running(ref) and _kill(ref.pid, number)
    try:
        # The descriptor holds on to whoever has the pid now; only then is it compared with whom we mean.
        descriptor = os.pidfd_open(ref.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_running(ref):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_for_end(ref: ProcessRef, timeout_s: float) -> bool:
    """Return whether exactly this process has ended, waiting up to `timeout_s` for it."""
    deadline_s = time.monotonic() + timeout_s
    if hasattr(os, "pidfd_open"):
        _wait_for_exit(ref.pid, timeout_s)
    while is_running(ref) and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)
    return not is_running(ref)


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _started_linux(pid: int) -> str | None:
    """Return boot and clock ticks since then: wall-clock start times shift when the clock is set."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    # The command name, in parentheses, may contain spaces and parentheses itself: fields are counted behind it.
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _started_elsewhere(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
