"""One process of a fault cluster: started, killed, frozen, thawed, asked to leave, and started again."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.lifecycle.orphan import command_under

TAIL_LINES = 12
TAIL_CHARS = 400


@dataclass(eq=False)
class FaultProcess:
    """A seat. Every life of it has the same command, the same addresses and one log."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the present or last life."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it lives; frozen counts as alive."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Begin a life; it ends with this process at the latest."""
        assert not self.is_running, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command_under(os.getpid(), self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                process_group=0,
            )

    def kill(self) -> None:
        """kill -9."""
        self._send(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP: sockets stay open and nobody answers."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: asked to leave."""
        self._send(signal.SIGTERM)

    async def ended(self, deadline_s: float) -> int:
        """Wait for the end of this life; return the exit code, negative for a signal."""
        assert self._process is not None
        try:
            async with asyncio.timeout(deadline_s):
                return await self._process.wait()
        except TimeoutError as error:
            raise AssertionError(f"{self.name} still runs after {deadline_s} s\n{self.tail()}") from error

    async def end(self) -> None:
        """End whatever lives here."""
        if self.is_running:
            self.thaw()
            self.kill()
            await self.ended(10.0)

    def tail(self) -> str:
        """Return the end of the log, for the report of a failing test."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- {self.name}", *(line[:TAIL_CHARS] for line in lines[-TAIL_LINES:])])

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
