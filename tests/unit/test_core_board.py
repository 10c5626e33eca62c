"""Workers of a host see in a shared file which cores are in use."""

import ctypes
from pathlib import Path

import pytest

from common.errors import InvalidSetting
from common.lifecycle.core_board import MAX_CORES, CoreBoard
from common.settings.parse import parse
from common.settings.worker import WorkerSettings


def test_a_worker_speaks_for_its_own_cores_alone(tmp_path: Path) -> None:
    first = CoreBoard(tmp_path / "cores", (0, 1), (2,))
    second = CoreBoard(tmp_path / "cores", (2,), (0, 1))
    first.occupy()
    assert [second.is_in_use(core) for core in range(4)] == [True, True, False, False]
    second.occupy()
    first.vacate()
    assert [first.is_in_use(core) for core in range(4)] == [False, False, True, False]


def test_numbers_are_where_it_says(tmp_path: Path) -> None:
    board = CoreBoard(tmp_path / "cores", (MAX_CORES - 1,), ())
    numbers = (ctypes.c_uint32 * MAX_CORES).from_address(board.address)
    board.occupy()
    assert sum(numbers) == numbers[MAX_CORES - 1] == 1


def test_the_successor_of_a_killed_worker_clears_what_that_left(tmp_path: Path) -> None:
    killed = CoreBoard(tmp_path / "cores", (0,), (1,))
    neighbour = CoreBoard(tmp_path / "cores", (1,), (0,))
    killed.occupy()
    neighbour.occupy()
    CoreBoard(tmp_path / "cores", (0,), (1,))
    assert not neighbour.is_in_use(0)
    assert killed.is_in_use(1)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cores").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="cores"):
        CoreBoard(tmp_path / "cores", (0,), ())
    assert not (tmp_path / "elsewhere").exists()


def test_cores_are_borrowed_by_a_board_only() -> None:
    environment = {"TANDEM_SECRET": "s", "TANDEM_REDIS_URL": "redis://127.0.0.1:1"}
    with pytest.raises(InvalidSetting, match="core_board"):
        parse(WorkerSettings, ["--borrowed-cpus", "1"], environment, "worker")
