"""A supervisor over tiny real processes: restarts, refusals, the order of a drain, and nothing left in any case."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import StartupError
from tandem.cluster.child import ChildRole, ChildSpec
from tandem.cluster.cluster import Cluster, Limits, Phase
from tandem.cluster.events import Died, Draining, Event, Narrator, logged
from tandem.cluster.identity import ProcessRef, is_running, ref_of, send_signal, wait_for_end
from tandem.cluster.state import ClusterState, StateDir
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
STUBBORN = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stdout.write('up\\n'); " + (
    "sys.stdout.flush(); signal.pause(); signal.pause()"
)


def _spec(
    name: str, script: str, role: ChildRole = ChildRole.DECODE, grace_s: float = 10.0, **environment: str
) -> ChildSpec:
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
async def _watched(folder: Path) -> AsyncIterator[Watched]:
    changed = asyncio.Event()
    events: list[Event] = []
    supervisor = Supervisor(lambda name: folder / f"{name}.log", changed.set, events.append)
    watched = Watched(supervisor, folder, changed, asyncio.Event(), events)
    try:
        yield watched
    finally:
        watched.hurry.set()
        await watched.supervisor.drain(watched.hurry)


async def test_a_dead_child_is_started_again(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        watched.supervisor.start([_spec("decode-0", WAITS)])
        await watched.until_up("decode-0")
        first = watched.pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await watched.until_up("decode-0", num_lives=2)
        assert watched.pid() not in (None, first)
        assert watched.events == [Died("decode-0", first, -signal.SIGKILL, 0.1)]
        assert watched.supervisor.children[0].num_restarts == 1
    assert len(watched.events) == 1  # who was stopped did not die


async def test_a_child_that_refuses_to_start_ends_everything_with_its_line(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        refuses = "import sys; sys.stderr.write('noise\\nmodel x is missing\\n\\n'); sys.exit(78)"
        watched.supervisor.start([_spec("prefill-0", WAITS), _spec("decode-0", refuses)])
        with pytest.raises(StartupError, match=r"^decode-0: model x is missing$"):
            await asyncio.wait_for(watched.supervisor.fail(), DEADLINE_S)


async def test_a_child_that_keeps_dying_at_start_is_given_up(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        watched.supervisor.start([_spec("decode-0", "raise SystemExit('broken')")])
        with pytest.raises(StartupError, match=r"decode-0 ended with exit code 1 3 times while starting .*: broken"):
            await asyncio.wait_for(watched.supervisor.fail(), DEADLINE_S)


async def test_a_settled_child_may_die_more_often(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        script = "import sys; sys.stdout.write('up\\n'); sys.exit(1)"
        watched.supervisor.start([_spec("decode-0", script)])
        watched.supervisor.settle()
        await watched.until_up("decode-0", num_lives=4)


async def test_drain_goes_from_gateways_over_workers_to_redis(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with _watched(tmp_path) as watched:
        for role in (ChildRole.REDIS, ChildRole.PREFILL, ChildRole.DECODE, ChildRole.GATEWAY):
            watched.supervisor.start([_spec(role, TELLS, role, JOURNAL=str(journal))])
            await watched.until_up(role)
        await watched.supervisor.drain(watched.hurry)
        left = journal.read_text().split()
        assert left[0] == "gateway"
        assert set(left[1:3]) == {"prefill", "decode"}
        assert left[3] == "redis"
        assert all(child.pid is None for child in watched.supervisor.children)


async def test_a_child_that_does_not_leave_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        watched.supervisor.start([_spec("decode-0", STUBBORN, grace_s=0.1)])
        await watched.until_up("decode-0")
        await asyncio.wait_for(watched.supervisor.drain(watched.hurry), DEADLINE_S)
        assert watched.pid() is None


async def test_hurry_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async with _watched(tmp_path) as watched:
        watched.supervisor.start([_spec("decode-0", STUBBORN, grace_s=600.0)])
        await watched.until_up("decode-0")
        drain = asyncio.create_task(watched.supervisor.drain(watched.hurry))
        await asyncio.sleep(0)
        assert not drain.done()
        watched.hurry.set()
        await asyncio.wait_for(drain, DEADLINE_S)


async def _ready() -> None:
    """Nothing to wait for."""


async def _never() -> None:
    await asyncio.Event().wait()


def _cluster(state_dir: StateDir, ready_timeout_s: float = 30.0, narrate: Narrator = lambda _: None) -> Cluster:
    state_dir.create()
    me = ref_of(os.getpid())
    assert me is not None
    return Cluster(
        state_dir, ClusterState(me, "m", "redis://x", "127.0.0.1", 0, "run"), Limits(ready_timeout_s, 7.0), narrate
    )


async def test_a_cluster_runs_until_it_is_told_to_stop(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    seen: list[ClusterState] = []

    def on_ready() -> None:
        state = state_dir.read()
        assert state is not None
        seen.append(state)
        os.kill(os.getpid(), signal.SIGTERM)

    phases = [Phase([_spec("redis", WAITS, ChildRole.REDIS)], _ready), Phase([_spec("decode-0", WAITS)], _ready)]
    events: list[Event] = []
    await asyncio.wait_for(_cluster(state_dir, narrate=events.append).run(phases, on_ready), DEADLINE_S)
    assert events == [Draining(7.0)]
    assert seen[0].is_ready
    after = state_dir.read()
    assert after is not None
    assert [(entry.name, entry.ref) for entry in after.processes] == [("redis", None), ("decode-0", None)]


def test_the_log_of_the_supervisor_tells_of_deaths(tmp_path: Path) -> None:
    log_file = tmp_path / "supervisor.log"
    events: list[Event] = []
    narrate = logged(events.append, log_file)
    for event in (Died("decode-0", 5685, -9, 1.0), Died("redis", 7, 3, 0.1), Draining(30.0)):
        narrate(event)
    assert len(events) == 3
    assert [line.partition(" ")[2] for line in log_file.read_text().splitlines()] == [
        "decode-0 (pid 5685) died (signal 9), starting it again in 1 s",
        "redis (pid 7) died (exit code 3), starting it again in 0.1 s",
        "finishing what runs (at most 30 s)",
    ]


async def test_a_cluster_that_is_not_ready_in_time_ends(tmp_path: Path) -> None:
    phases = [Phase([_spec("decode-0", WAITS)], _never)]
    with pytest.raises(StartupError, match=r"not ready after 0\.2 s"):
        await _cluster(StateDir(tmp_path), ready_timeout_s=0.2).run(phases, lambda: None)


SUPERVISES = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_supervisor import WAITS, _cluster, _ready, _spec
from tandem.cluster.cluster import Phase
from tandem.cluster.state import StateDir

state_dir = StateDir(Path(sys.argv[1]))
phases = [Phase([_spec("decode-0", WAITS), _spec("decode-1", WAITS)], _ready)]


async def main():
    await _cluster(state_dir).run(phases, lambda: print("ready", flush=True))


asyncio.run(main())
"""


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends orphans")
def test_no_orphan_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with subprocess.Popen((sys.executable, "-c", SUPERVISES, str(tmp_path)), stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"ready\n"
        children = _children_in(StateDir(tmp_path))
        assert len(children) == 2
        supervisor.kill()
    assert all(wait_for_end(child, DEADLINE_S) for child in children)


def _children_in(state_dir: StateDir) -> list[ProcessRef]:
    state = state_dir.read()
    assert state is not None
    return [entry.ref for entry in state.processes if entry.ref is not None]


def test_a_signal_reaches_exactly_the_process_that_is_meant() -> None:
    with subprocess.Popen((sys.executable, "-S", "-c", WAITS), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        ref = ref_of(process.pid)
        assert ref is not None
        assert not send_signal(ProcessRef(ref.pid, "another time"), signal.SIGKILL)
        assert is_running(ref)
        assert send_signal(ref, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert not is_running(ref)
    assert not send_signal(ref, signal.SIGTERM)
