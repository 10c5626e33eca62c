"""The processes of a measurement, each on the core that it is given, with what they use of it."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

START_TIMEOUT_S = 180.0
"""LiteLLM imports for half a minute on a busy machine."""

LOOK_S = 0.05
STOP_TIMEOUT_S = 10.0
TOLD_OF_LOG = 2000
MIB = 1 << 20


class NotStarted(Exception):
    """A process does not come up."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the measured process may use, and which the rest; None: there are too few to keep them apart."""

    measured: int | None
    rest: int | None

    @classmethod
    def of_machine(cls) -> "Cores":
        """Return the first two cores that this process may use."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        return cls(usable[0], usable[1]) if len(usable) > 1 else cls(None, None)


def pin(core: int | None, pid: int = 0) -> None:
    """Let a process, this one by default, use that core alone."""
    if core is not None:
        os.sched_setaffinity(pid, {core})


class Measured:
    """A running process, with all that it has started."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        """Return the CPU time used so far."""
        times = [process.cpu_times() for process in self._family()]
        return sum(time.user + time.system for time in times)

    def rss_mib(self) -> float:
        """Return the memory in use."""
        return sum(process.memory_info().rss for process in self._family()) / MIB

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str | Path], core: int | None, log: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """Run a program on a core while entered; its output goes to a file. Gives its pid."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - returns when the program is started
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    pin(core, process.pid)  # before it has threads, which inherit it
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


async def until_answered(port: int, path: str, pid: int, log: Path, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when a GET is answered with 200; raises `NotStarted` with the end of the log if that does not come."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at and _is_alive(pid):
        if await _status(port, path) == b"200":
            return
        await asyncio.sleep(LOOK_S)
    raise NotStarted(f"port {port} does not answer: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-TOLD_OF_LOG:]


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def _status(port: int, path: str) -> bytes:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        try:
            return (await reader.readline()).split(b" ")[1]
        except (OSError, IndexError):
            return b""
