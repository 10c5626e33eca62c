"""Processes that are replaced while the cluster runs: who leaves when, who stays if the next one does not come."""

import asyncio
from pathlib import Path

import pytest

from common.errors import StartupError
from tandem.cluster.child import Child, ChildRole
from tandem.cluster.supervisor import UntilReady
from tests.support.polling import until
from tests.support.supervised import (
    DEADLINE_S,
    LINGERS,
    TELLS,
    WAITS,
    Watched,
    refuses_on_demand,
    spec,
    watched_supervisor,
)


def _until_up(watched: Watched, num_lives: int) -> UntilReady:
    return lambda child: watched.until_up(child.spec.name, num_lives)


async def _never(_: Child) -> None:
    await asyncio.Event().wait()


async def test_a_worker_is_replaced_when_it_has_left(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", TELLS, JOURNAL=str(journal))])
        watched.supervisor.settle()
        await watched.until_up("decode-0")
        old = watched.supervisor.children[0]
        old_pid = old.pid

        async def until_ready(child: Child) -> None:
            assert journal.read_text() == "decode-0\n"  # the seat is empty before the next one is started
            await watched.until_up(child.spec.name, 2)

        new = await watched.supervisor.replace(old, until_ready, DEADLINE_S)
        assert watched.supervisor.children == [new]
        assert new.pid not in (None, old_pid)
        assert (new.num_restarts, old.pid) == (1, None)
    assert watched.events == []


async def test_a_gateway_leaves_when_the_next_one_is_ready(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("gateway-0", TELLS, ChildRole.GATEWAY, JOURNAL=str(journal))])
        watched.supervisor.settle()
        await watched.until_up("gateway-0")
        old = watched.supervisor.children[0]

        async def until_ready(child: Child) -> None:
            await watched.until_up(child.spec.name, 2)
            assert not journal.exists()
            assert old.pid is not None

        new = await watched.supervisor.replace(old, until_ready, DEADLINE_S)
        assert watched.supervisor.children == [new]
        assert (new.num_restarts, old.pid) == (1, None)
        assert journal.read_text() == "gateway-0\n"


@pytest.mark.parametrize("role", [ChildRole.DECODE, ChildRole.GATEWAY])
async def test_a_successor_that_refuses_to_start_is_told_in_one_line(tmp_path: Path, role: ChildRole) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("seat-0", refuses_on_demand(tmp_path), role)])
        watched.supervisor.settle()
        await watched.until_up("seat-0")
        (tmp_path / "refuse").touch()
        child = watched.supervisor.children[0]
        pid = child.pid
        with pytest.raises(StartupError, match=r"^seat-0.*: the model is gone$"):
            await watched.supervisor.replace(child, _until_up(watched, 2), DEADLINE_S)
        if role is ChildRole.GATEWAY:
            assert watched.pid() == pid  # it has never been asked to leave
        else:
            assert watched.supervisor.children[0].refusal == "the model is gone"


async def test_a_successor_that_is_not_ready_in_time_is_told(tmp_path: Path) -> None:
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("gateway-0", WAITS, ChildRole.GATEWAY)])
        watched.supervisor.settle()
        await watched.until_up("gateway-0")
        child = watched.supervisor.children[0]
        with pytest.raises(StartupError, match=r"gateway-0 does not come back: not ready after 0\.2 s"):
            await watched.supervisor.replace(child, _never, 0.2)
        assert watched.supervisor.children == [child]
        assert child.pid is not None


async def test_a_stop_during_a_replacement_asks_nobody_twice(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with watched_supervisor(tmp_path) as watched:
        watched.supervisor.start([spec("decode-0", LINGERS, JOURNAL=str(journal))])
        watched.supervisor.settle()
        await watched.until_up("decode-0")
        replacing = asyncio.create_task(
            watched.supervisor.replace(watched.supervisor.children[0], _until_up(watched, 2), DEADLINE_S)
        )
        await until(journal.exists, "it was asked to leave", DEADLINE_S)
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)
        draining = asyncio.create_task(watched.supervisor.drain(watched.hurry))
        await asyncio.sleep(0)
        (tmp_path / "done").touch()
        await asyncio.wait_for(draining, DEADLINE_S)
        assert journal.read_text() == "asked\n"
        assert watched.supervisor.children[0].pid is None
