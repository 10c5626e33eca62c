"""Orders for a running cluster: what is asked over the socket happens in turn, and every end is told."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_FAILURE
from tandem import cli
from tandem.cluster.child import Child, ChildRole
from tandem.cluster.control import ControlDesk, Done, Reply, RestartOrder, control_socket_in, give_order
from tandem.cluster.events import Event, Failed, Restarted
from tandem.cluster.identity import ref_of
from tandem.cluster.rolling import RollingRestart
from tandem.cluster.state import ClusterState, StateDir
from tests.support.polling import until
from tests.support.supervised import DEADLINE_S, WAITS, Watched, refuses_on_demand, spec, watched_supervisor

GATEWAYS = ("gateway-0", "gateway-1")


@dataclass
class Open:
    """A cluster of two gateways that takes orders."""

    watched: Watched
    desk: ControlDesk
    socket: Path
    told: list[Event]
    may_be_ready: asyncio.Event

    async def order(self, *names: str, timeout_s: float = DEADLINE_S) -> list[Reply]:
        async with asyncio.timeout(2 * DEADLINE_S):
            return [reply async for reply in give_order(self.socket, RestartOrder(names, timeout_s))]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Open]:
    async with opened(tmp_path, WAITS) as running:
        yield running


@asynccontextmanager
async def opened(folder: Path, script: str) -> AsyncIterator[Open]:
    may_be_ready = asyncio.Event()
    may_be_ready.set()
    async with watched_supervisor(folder) as watched:
        watched.supervisor.start([spec("redis", WAITS, ChildRole.REDIS)])
        watched.supervisor.start([spec(name, script, ChildRole.GATEWAY) for name in GATEWAYS])
        watched.supervisor.settle()
        for name in GATEWAYS:
            await watched.until_up(name)

        async def until_ready(child: Child) -> None:
            await watched.until_up(child.spec.name, 2)
            await may_be_ready.wait()

        told: list[Event] = []
        socket = control_socket_in(folder)
        desk = ControlDesk(socket, RollingRestart(watched.supervisor, until_ready), told.append)
        async with desk:
            yield Open(watched, desk, socket, told, may_be_ready)


def restarted(replies: list[Reply]) -> list[str]:
    return [reply.name for reply in replies if isinstance(reply, Restarted)]


async def test_without_names_all_but_redis_are_restarted_in_turn(cluster: Open) -> None:
    before = [child.pid for child in cluster.watched.supervisor.children]
    replies = await cluster.order()
    assert restarted(replies) == list(GATEWAYS)
    assert replies[-1] == Done()
    after = [child.pid for child in cluster.watched.supervisor.children]
    assert after[0] == before[0]
    assert not set(after[1:]) & set(before)
    assert [reply.old_code for reply in replies if isinstance(reply, Restarted)] == [0, 0]
    assert [reply.old_pid for reply in replies if isinstance(reply, Restarted)] == before[1:]
    assert cluster.told == replies[:-1]  # the supervisor's own log has it, too


async def test_a_name_or_a_role_chooses(cluster: Open) -> None:
    assert restarted(await cluster.order("gateway-1")) == ["gateway-1"]
    assert restarted(await cluster.order("gateway")) == list(GATEWAYS)


@pytest.mark.parametrize("name", ["decode-7", "redis"])
async def test_what_cannot_be_restarted_is_refused_before_anything_is(cluster: Open, name: str) -> None:
    before = [child.pid for child in cluster.watched.supervisor.children]
    (failed,) = await cluster.order("gateway-0", name)
    assert isinstance(failed, Failed)
    assert failed.exit_code == EXIT_CONFIG
    assert failed.line == f"name='{name}': is no process to restart; there are gateway-0, gateway-1"
    assert [child.pid for child in cluster.watched.supervisor.children] == before


async def test_one_order_at_a_time(cluster: Open) -> None:
    cluster.may_be_ready.clear()
    first = asyncio.create_task(cluster.order("gateway-0"))
    await cluster.watched.until_up("gateway-0", 2)
    assert await cluster.order("gateway-1") == [Failed("a restart is under way already", EXIT_CONFIG)]
    cluster.may_be_ready.set()
    assert (await first)[-1] == Done()
    assert (await cluster.order("gateway-1"))[-1] == Done()


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b"x" * (1 << 17) + b"\n"], ids=["unknown", "no text", "endless"])
async def test_what_is_no_order_is_answered(cluster: Open, line: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(cluster.socket))
    writer.write(line)
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.readline()
    assert msgspec.json.decode(answer, type=Failed).exit_code == EXIT_CONFIG
    writer.close()


async def test_one_that_does_not_come_back_ends_the_order(tmp_path: Path) -> None:
    async with opened(tmp_path, refuses_on_demand(tmp_path)) as cluster:
        (tmp_path / "refuse").touch()
        assert await cluster.order() == [Failed("gateway-0: the model is gone", EXIT_FAILURE)]
        assert all(child.pid is not None for child in cluster.watched.supervisor.children)


async def test_who_hangs_up_stops_the_order_behind_the_process_at_hand(cluster: Open) -> None:
    cluster.may_be_ready.clear()
    _, writer = await asyncio.open_unix_connection(str(cluster.socket))
    writer.write(b'{"type":"restart","names":[],"timeout_s":60}\n')
    await cluster.watched.until_up("gateway-0", 2)
    writer.close()
    await writer.wait_closed()
    cluster.may_be_ready.set()
    await until(lambda: len(cluster.told) == 1, "gateway-0 was restarted", DEADLINE_S)
    assert restarted(await cluster.order("gateway-1")) == ["gateway-1"]
    assert [event.name for event in cluster.told if isinstance(event, Restarted)] == list(GATEWAYS)


async def test_nonsense_is_answered(cluster: Open) -> None:
    reader, writer = await asyncio.open_unix_connection(str(cluster.socket))
    writer.write(b"nonsense\n")
    assert b'"failed"' in await asyncio.wait_for(reader.read(), DEADLINE_S)
    writer.close()


async def test_a_stop_during_a_restart_ends_it_in_one_line(
    cluster: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_state(tmp_path, is_ready=True)
    cluster.may_be_ready.clear()
    command = asyncio.create_task(asyncio.to_thread(cli.run, ["restart", "--state-dir", str(tmp_path)]))
    await cluster.watched.until_up("gateway-0", 2)
    await cluster.desk.__aexit__(None, None, None)
    assert await command == EXIT_FAILURE
    assert capsys.readouterr().err == "tandem: the cluster was stopped before everything was restarted\n"


@pytest.mark.parametrize(("is_ready", "phase"), [(True, "being stopped"), (False, "still starting")])
def test_a_cluster_that_is_not_open_restarts_nothing(
    tmp_path: Path, is_ready: bool, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_state(tmp_path, is_ready=is_ready)
    assert cli.run(["restart", "decode-0", "--state-dir", str(tmp_path)]) == EXIT_CONFIG
    assert capsys.readouterr().err == f"tandem: the cluster is {phase}: nothing is restarted\n"


async def test_the_command_prints_a_line_for_each(
    cluster: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_state(tmp_path, is_ready=True)
    assert await asyncio.to_thread(cli.run, ["restart", "--state-dir", str(tmp_path), "gateway-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [event.line for event in cluster.told if isinstance(event, Restarted)]
    assert lines[0].startswith("gateway-1 restarted in ")


def _write_state(folder: Path, *, is_ready: bool) -> None:
    me = ref_of(os.getpid())
    assert me is not None
    StateDir(folder).write(ClusterState(me, "m", "redis://x", "127.0.0.1", 0, str(folder), is_ready))
