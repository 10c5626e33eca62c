"""A supervisor over tiny real processes: restarts, refusals, the order of a drain, and nothing left in any case."""

import asyncio
import dataclasses
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_CONFIG
from tandem.cluster.backoff import LONGEST_S
from tandem.cluster.child import MAX_STARTS, ChildRole
from tandem.cluster.cluster import Cluster, Limits, Phase
from tandem.cluster.events import Died, Draining, Event, Left, Narrator, NotStarted, Restarted, logged
from tandem.cluster.identity import ProcessRef, is_running, ref_of, send_signal, wait_for_end
from tandem.cluster.state import ClusterState, StateDir
from tests.support.polling import until
from tests.support.supervised import (
    DEADLINE_S,
    STUBBORN,
    TELLS,
    WAITS,
    refuses_on_demand,
    spec,
    watched_supervisor,
)


async def test_a_dead_child_is_started_again(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", WAITS)])
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
    async with watched_supervisor(tmp_path) as watched:
        refuses = "import sys; sys.stderr.write('noise\\nmodel x is missing\\n\\n'); sys.exit(78)"
        watched.supervisor.start([spec("prefill-0", WAITS), spec("decode-0", refuses)])
        with pytest.raises(StartupError, match=r"^decode-0: model x is missing$"):
            await asyncio.wait_for(watched.supervisor.fail(), DEADLINE_S)


async def test_a_child_that_keeps_dying_at_start_is_given_up(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", "raise SystemExit('broken')")])
        with pytest.raises(StartupError, match=r"decode-0 ended with exit code 1 3 times while starting .*: broken"):
            await asyncio.wait_for(watched.supervisor.fail(), DEADLINE_S)


async def test_a_settled_child_may_die_more_often(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        script = "import sys; sys.stdout.write('up\\n'); sys.exit(1)"
        watched.supervisor.start([spec("decode-0", script)])
        watched.supervisor.settle()
        await watched.until_up("decode-0", num_lives=4)


async def test_a_child_that_leaves_in_order_is_no_death(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", WAITS)])
        watched.supervisor.settle()
        for num_lives in range(1, 5):
            await watched.until_up("decode-0", num_lives)
            pid = watched.pid()
            assert pid is not None
            os.kill(pid, signal.SIGTERM)
            await watched.until_up("decode-0", num_lives + 1)
            left = watched.events[-1]
            assert isinstance(left, Left)
            assert (left.name, left.pid) == ("decode-0", pid)
        assert len(watched.events) == 4


async def test_a_child_that_leaves_at_once_is_started_again_ever_later(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", "import sys; sys.stdout.write('up\\n')")])
        watched.supervisor.settle()
        await watched.until_up("decode-0", num_lives=4)
        delays = [event.delay_s for event in watched.events if isinstance(event, Left)]
        assert delays[:3] == [0.1, 0.2, 0.4]


async def test_a_settled_child_that_cannot_be_spawned_is_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    with (tmp_path / "lent").open("w") as file:
        # A number that nobody else is given meanwhile: the system gives the lowest ones that are free.
        lent = fcntl.fcntl(file, fcntl.F_DUPFD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 9)
    os.close(lent)  # what it should inherit is not there: the system refuses to start it
    async with watched_supervisor(tmp_path) as watched:
        gateway = dataclasses.replace(spec("gateway-0", WAITS, ChildRole.GATEWAY), descriptors=(lent,))
        watched.supervisor.start([spec("decode-0", WAITS), gateway])
        watched.supervisor.settle()
        await watched.until(lambda: len(watched.events) >= MAX_STARTS + 1)
        delays_s = (0.1, 0.2, 0.4, 0.8)
        assert watched.events == [NotStarted("gateway-0", delay_s, "Bad file descriptor") for delay_s in delays_s]
        child = watched.supervisor.children[1]
        assert (child.pid, child.num_restarts, child.trouble) == (
            None,
            MAX_STARTS,
            "could not be started: Bad file descriptor",
        )
        assert watched.pid(0) is not None
        with (tmp_path / "lent").open() as file:
            assert fcntl.fcntl(file, fcntl.F_DUPFD, lent) == lent
        await watched.until_up("gateway-0")
        os.close(lent)
        assert (child.pid is None, child.trouble) == (False, "")


async def test_a_child_whose_log_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").mkdir()
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", WAITS)])
        await watched.until(lambda: bool(watched.events))
        assert watched.events == [NotStarted("decode-0", 0.1, "Is a directory")]
        (tmp_path / "decode-0.log").rmdir()
        await watched.until_up("decode-0")


async def test_a_child_that_can_never_be_spawned_ends_the_start_of_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").mkdir()
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", WAITS)])
        with pytest.raises(StartupError, match=r"^decode-0 could not be started: Is a directory$"):
            await asyncio.wait_for(watched.supervisor.fail(), DEADLINE_S)
        assert len(watched.events) == MAX_STARTS - 1


async def test_a_settled_child_that_refuses_to_start_leaves_the_others_alone(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", refuses_on_demand(tmp_path)), spec("decode-1", WAITS)])
        watched.supervisor.settle()
        await watched.until_up("decode-0")
        (tmp_path / "refuse").touch()
        pid = watched.pid()
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        await watched.until(lambda: any(isinstance(event, Died) for event in watched.events))
        died = next(event for event in watched.events if isinstance(event, Died))
        assert (died.code, died.delay_s, died.reason) == (EXIT_CONFIG, LONGEST_S, "the model is gone")
        assert watched.pid(1) is not None


async def test_drain_goes_from_gateways_over_workers_to_redis(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with watched_supervisor(tmp_path) as watched:
        for role in (ChildRole.REDIS, ChildRole.PREFILL, ChildRole.DECODE, ChildRole.GATEWAY):
            watched.supervisor.start([spec(role, TELLS, role, JOURNAL=str(journal))])
            await watched.until_up(role)
        await watched.supervisor.drain(watched.hurry)
        left = journal.read_text().split()
        assert left[0] == "gateway"
        assert set(left[1:3]) == {"prefill", "decode"}
        assert left[3] == "redis"
        assert all(child.pid is None for child in watched.supervisor.children)


async def test_a_child_that_does_not_leave_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", STUBBORN, grace_s=0.1)])
        await watched.until_up("decode-0")
        await asyncio.wait_for(watched.supervisor.drain(watched.hurry), DEADLINE_S)
        assert watched.pid() is None


async def test_hurry_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", STUBBORN, grace_s=600.0)])
        await watched.until_up("decode-0")
        drain = asyncio.create_task(watched.supervisor.drain(watched.hurry))
        await asyncio.sleep(0)
        assert not drain.done()
        watched.hurry.set()
        await asyncio.wait_for(drain, DEADLINE_S)


async def test_a_child_inherits_what_its_spec_says(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    script = f"import os; os.write({writing}, b'here'); os.close({writing}); " + WAITS
    async with watched_supervisor(tmp_path) as watched:
        heir = dataclasses.replace(spec("gateway-0", script, ChildRole.GATEWAY), descriptors=(writing,))
        watched.supervisor.start([heir])
        await watched.until_up("gateway-0")
        os.close(writing)
        assert os.read(reading, 10) == b"here"
    os.close(reading)


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

    @asynccontextmanager
    async def business() -> AsyncIterator[None]:
        state = state_dir.read()
        assert state is not None
        seen.append(state)
        os.kill(os.getpid(), signal.SIGTERM)
        yield
        assert events == []  # closed before anything is told to leave

    phases = [Phase([spec("redis", WAITS, ChildRole.REDIS)], _ready), Phase([spec("decode-0", WAITS)], _ready)]
    events: list[Event] = []
    await asyncio.wait_for(_cluster(state_dir, narrate=events.append).run(phases, business()), DEADLINE_S)
    assert events == [Draining(7.0)]
    assert seen[0].is_ready
    after = state_dir.read()
    assert after is not None
    assert [(entry.name, entry.ref) for entry in after.processes] == [("redis", None), ("decode-0", None)]


def test_the_log_of_the_supervisor_tells_of_deaths(tmp_path: Path) -> None:
    log_file = tmp_path / "supervisor.log"
    events: list[Event] = []
    narrate = logged(events.append, log_file)
    told = (
        Died("decode-0", 5685, -9, 1.0),
        Died("redis", 7, 3, 0.1),
        Died("decode-1", 8, 78, 10.0, "the model is gone"),
        NotStarted("decode-1", 0.4, "Too many open files"),
        Left("decode-0", 9, 0.2),
        Restarted("decode-0", 9, 10, 2.04, 0),
        Restarted("decode-0", 10, 11, 2.0, -9),
        Draining(30.0),
    )
    for event in told:
        narrate(event)
    assert events == list(told)
    assert [line.partition(" ")[2] for line in log_file.read_text().splitlines()] == [
        "decode-0 (pid 5685) died (signal 9), starting it again in 1 s",
        "redis (pid 7) died (exit code 3), starting it again in 0.1 s",
        "decode-1 (pid 8) died (exit code 78: the model is gone), starting it again in 10 s",
        "decode-1 could not be started (Too many open files), trying again in 0.4 s",
        "decode-0 (pid 9) has left, starting it again in 0.2 s",
        "decode-0 restarted in 2.0 s (pid 9 -> 10)",
        "decode-0 restarted in 2.0 s (pid 10 -> 11); the old process ended by signal 9",
        "finishing what runs (at most 30 s)",
    ]


async def test_a_cluster_goes_on_while_its_state_cannot_be_written(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    cluster = _cluster(state_dir)
    draft = tmp_path / f".cluster.json.{os.getpid()}"

    @asynccontextmanager
    async def business() -> AsyncIterator[None]:
        draft.mkdir()  # now every attempt to write the state fails
        child = cluster.supervisor.children[0]
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.pid not in (None, first), "the child is started again", DEADLINE_S)
        draft.rmdir()
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    await asyncio.wait_for(cluster.run([Phase([spec("decode-0", WAITS)], _ready)], business()), DEADLINE_S)
    after = state_dir.read()
    assert after is not None
    assert [(entry.ref, entry.restarts) for entry in after.processes] == [(None, 1)]


async def test_a_cluster_that_is_not_ready_in_time_ends(tmp_path: Path) -> None:
    phases = [Phase([spec("decode-0", WAITS)], _never)]
    with pytest.raises(StartupError, match=r"not ready after 0\.2 s"):
        await _cluster(StateDir(tmp_path), ready_timeout_s=0.2).run(phases, nullcontext())


SUPERVISES = """
import asyncio, sys
from contextlib import asynccontextmanager
from pathlib import Path
from tests.integration.test_supervisor import _cluster, _ready
from tests.support.supervised import WAITS, spec
from tandem.cluster.cluster import Phase
from tandem.cluster.state import StateDir

state_dir = StateDir(Path(sys.argv[1]))
phases = [Phase([spec("decode-0", WAITS), spec("decode-1", WAITS)], _ready)]


@asynccontextmanager
async def business():
    print("ready", flush=True)
    yield


async def main():
    await _cluster(state_dir).run(phases, business())


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
