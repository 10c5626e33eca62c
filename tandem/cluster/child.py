"""One seat of a cluster and the process that sits in it: started, watched, started again, and stopped at last."""

import asyncio
import contextlib
import enum
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_OK
from common.lifecycle.orphan import command_under
from tandem.cluster.backoff import LONGEST_S, Backoff
from tandem.cluster.events import Died, Left, Narrator, NotStarted

MAX_STARTS = 3
"""Lives that a process gets before the cluster is ready for the first time: a bug must not look like a slow start."""

TAIL_BYTES = 8192
NUM_ERROR_CHARS = 600


class ChildRole(enum.StrEnum):
    """What a supervised process does."""

    REDIS = "redis"
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


WORKER_ROLES = frozenset({ChildRole.PREFILL, ChildRole.DECODE})


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one process. `grace_s`: how long it may take to leave after SIGTERM; `descriptors`: what it
    inherits."""

    name: str
    role: ChildRole
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    grace_s: float
    descriptors: tuple[int, ...] = ()


class Child:
    """Owns the process of one seat, from its first start to `stop`; it is started again whenever it ends before that.

    `on_change` is called whenever the process changes; `narrate` hears of deaths.
    """

    def __init__(
        self,
        spec: ChildSpec,
        log_file: Path,
        on_change: Callable[[], None],
        narrate: Narrator,
        *,
        num_lives_before: int = 0,
    ) -> None:
        self.spec = spec
        self.refusal = ""
        """Why its last life refused to start; empty if it did not."""
        self.trouble = ""
        """Why nobody sits here although somebody should, as far as it is known; empty from the next start on."""
        self.exit_code: int | None = None
        """How its last life ended (< 0: by that signal), None if none has."""
        self._log_file = log_file
        self._on_change = on_change
        self._narrate = narrate
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()
        self._backoff = Backoff()
        self._is_settled = False
        self.num_lives = num_lives_before
        """Starts of a process for this seat, also those that failed and those before this one."""

    @property
    def pid(self) -> int | None:
        """Who sits here now, None between two lives."""
        return None if self._process is None else self._process.pid

    @property
    def num_restarts(self) -> int:
        """How often the process was started again."""
        return max(0, self.num_lives - 1)

    def settle(self) -> None:
        """The process was ready: from now on it is started again however it ends, even if it refuses to start."""
        self._is_settled = True

    async def keep(self) -> None:
        """Run the process until `stop`; start it again when it dies.

        Raises `StartupError` when it refuses to start, or keeps dying, before it was settled.
        """
        try:
            while not self._stopping.is_set():
                await self._live()
        finally:
            self._gone.set()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Ask the process to leave, once; kill it, and what it started, when its grace is over or `hurry` is set."""
        if not self._stopping.is_set():  # a process that is asked twice hurries
            self._stopping.set()
            self._terminate()
        if not await _is_set_within(self._gone, hurry, self.spec.grace_s):
            self._kill()
            await self._gone.wait()

    async def _live(self) -> None:
        self.num_lives += 1
        try:
            with self._log_file.open("ab") as log:
                log_start = log.tell()
                process = self._process = await self._spawn(log.fileno())
        except OSError as error:  # no room for a process, a descriptor or a line of its log: that may pass
            delay_s = self._note_failed_start(error)
        else:
            delay_s = await self._attend(process, log_start)
        if not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _attend(self, process: asyncio.subprocess.Process, log_start: int) -> float:
        """Wait for the end of a process; return how long to wait before the next start."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self.trouble = ""
        self._on_change()
        try:
            code = self.exit_code = await process.wait()
        except asyncio.CancelledError:
            self._kill()
            raise
        self._process = None
        try:
            if self._stopping.is_set():
                return 0.0
            return self._note_end(process.pid, code, loop.time() - started_s, log_start)
        finally:
            self._on_change()

    def _note_failed_start(self, error: OSError) -> float:
        """Tell of a process that could not be started; return how long to wait before the next attempt."""
        reason = error.strerror or str(error)
        self.trouble = f"could not be started: {reason}"
        delay_s = self._backoff.delay_after(0.0)
        if not self._is_settled and self._backoff.num_deaths >= MAX_STARTS:
            raise StartupError(f"{self.spec.name} {self.trouble}") from error
        self._narrate(NotStarted(self.spec.name, delay_s, reason))
        self._on_change()
        return delay_s

    def _note_end(self, pid: int, code: int, lived_s: float, log_start: int) -> float:
        """Tell of an end that nobody here asked for; return how long to wait before the next start."""
        self.refusal = ""
        delay_s = self._backoff.delay_after(lived_s)
        if code == EXIT_OK and self._is_settled:
            self._narrate(Left(self.spec.name, pid, delay_s))
            return delay_s
        line = last_line(self._log_file, log_start)
        if not self._is_settled:
            self._give_up_if_hopeless(code, line)
        elif code == EXIT_CONFIG:
            # The others go on: what it lacks may come back, and starting often would not bring it.
            delay_s, self.refusal = LONGEST_S, line or "refused to start"
            self.trouble = self.refusal
        self._narrate(Died(self.spec.name, pid, code, delay_s, self.refusal))
        return delay_s

    async def _spawn(self, log: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *command_under(os.getpid(), self.spec.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.spec.environment,
            process_group=0,  # Ctrl-C in the terminal reaches the supervisor alone, which stops the others in order
            pass_fds=self.spec.descriptors,
        )
        if self._stopping.is_set():  # stopped while it was being started
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        return process

    def _give_up_if_hopeless(self, code: int, line: str) -> None:
        if code == EXIT_CONFIG:
            raise StartupError(f"{self.spec.name}: {line or 'refused to start'}")
        if self._backoff.num_deaths >= MAX_STARTS:
            raise StartupError(
                f"{self.spec.name} {_death(code)} {MAX_STARTS} times while starting ({self._log_file}): {line}"
            )

    def _terminate(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def last_line(file: Path, start: int) -> str:
    """Return the last line with anything on it that was written behind `start` (bytes); empty if there is none."""
    try:
        with file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:  # no descriptor is left, or somebody removed it
        return ""
    return next((line.strip()[:NUM_ERROR_CHARS] for line in reversed(lines) if line.strip()), "")


def _death(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


async def _is_set_within(event: asyncio.Event, hurry: asyncio.Event, limit_s: float) -> bool:
    """Wait for `event`, but not after `hurry` is set nor for longer than `limit_s`; return whether it is set."""
    waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(hurry.wait())]
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return event.is_set()
