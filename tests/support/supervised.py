"""Tiny scripts as the children of a supervisor, and a supervisor that is watched."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.child import ChildRole, ChildSpec
from tandem.cluster.events import Event
from tandem.cluster.supervisor import Supervisor
from tests.support.polling import until

DEADLINE_S = 20.0

PATIENT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); sys.stdout.write('up\\n'); "
WAITS = PATIENT + "sys.stdout.flush(); signal.pause()"
TELLS = (
    "import os, signal, sys\n"
    "def leave(*_):\n"
    "    with open(os.environ['JOURNAL'], 'a') as journal: journal.write(os.environ['NAME'] + '\\n')\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "sys.stdout.write('up\\n'); sys.stdout.flush()\n"
    "signal.pause()\n"
)
LINGERS = (
    "import os, pathlib, signal, sys, time\n"
    "journal = pathlib.Path(os.environ['JOURNAL'])\n"
    "def leave(*_):\n"
    "    with journal.open('a') as file: file.write('asked\\n')\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "sys.stdout.write('up\\n'); sys.stdout.flush()\n"
    "while not journal.with_name('done').exists(): time.sleep(0.01)\n"
)
STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stdout.write('up\\n'); " + (
    "sys.stdout.flush(); signal.pause(); signal.pause()"
)


def spec(
    name: str, script: str, role: ChildRole = ChildRole.DECODE, grace_s: float = 10.0, **environment: str
) -> ChildSpec:
    """Return a child that runs a script."""
    command = (sys.executable, "-S", "-c", script)
    return ChildSpec(name, role, command, {**os.environ, "NAME": name, **environment}, grace_s)


@dataclass
class Watched:
    """A supervisor under test; `changed` is set whenever a child starts or ends."""

    supervisor: Supervisor
    folder: Path
    changed: asyncio.Event
    hurry: asyncio.Event
    events: list[Event]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    async def until_up(self, name: str, num_lives: int = 1) -> None:
        """Wait until the child has said for the `num_lives`th time that it is up."""
        log = self.folder / f"{name}.log"
        await until(
            lambda: log.exists() and log.read_text().count("up\n") >= num_lives, f"{name} says it is up", DEADLINE_S
        )

    def pid(self, number: int = 0) -> int | None:
        return self.supervisor.children[number].pid


@asynccontextmanager
async def watched_supervisor(folder: Path) -> AsyncIterator[Watched]:
    """A supervisor whose children are killed when the block is left."""
    changed = asyncio.Event()
    events: list[Event] = []
    supervisor = Supervisor(lambda name: folder / f"{name}.log", changed.set, events.append)
    watched = Watched(supervisor, folder, changed, asyncio.Event(), events)
    try:
        yield watched
    finally:
        watched.hurry.set()
        await watched.supervisor.drain(watched.hurry)


def refuses_on_demand(folder: Path) -> str:
    """A script that refuses to start while there is a file named refuse."""
    refuses = "sys.stderr.write('the model is gone\\n'); sys.exit(78)"
    return f"import pathlib, sys\nif pathlib.Path({str(folder / 'refuse')!r}).exists(): {refuses}\n{WAITS}"
