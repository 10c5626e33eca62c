"""A team runs every piece of every phase once and in order, whoever comes late."""

import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.conftest import Probe

MAX_PHASES = 8


@pytest.fixture(scope="module")
def functions(probe: Probe) -> ctypes.CDLL:
    functions = probe("team", "native/team.cpp")
    functions.team_new.restype = ctypes.c_void_p
    functions.team_new_borrowing.restype = ctypes.c_void_p
    functions.team_delete.argtypes = [ctypes.c_void_p]
    functions.team_violations.restype = ctypes.c_int64
    pointer = ctypes.POINTER(ctypes.c_int64)
    functions.team_violations.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, pointer, ctypes.c_int]
    functions.team_relay.restype = ctypes.c_int64
    functions.team_relay.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    functions.team_members_seen.argtypes = [ctypes.c_void_p, ctypes.c_int]
    return functions


@pytest.fixture(params=[1, 2, 3, 4])
def team(functions: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[int]:
    team: int = functions.team_new(request.param, MAX_PHASES)
    yield team
    functions.team_delete(team)


def _violations(functions: ctypes.CDLL, team: int, steps: int, counts: list[int], slow_us: int = 0) -> int:
    sizes = (ctypes.c_int64 * len(counts))(*counts)
    result: int = functions.team_violations(team, steps, len(counts), sizes, slow_us)
    return result


@pytest.mark.parametrize("counts", [[1], [100], [0, 5, 0, 1, 33], [2, 1, 2, 1, 2, 1, 2, 1]])
def test_each_piece_runs_once_and_phases_are_ordered(functions: ctypes.CDLL, team: int, counts: list[int]) -> None:
    assert _violations(functions, team, 300, counts) == 0


def test_helpers_that_come_late_do_no_harm(functions: ctypes.CDLL, team: int) -> None:
    # A step takes far less than the delay, so that helpers arrive in steps that are over while others run.
    assert _violations(functions, team, 500, [3, 2, 7, 1], slow_us=150) == 0


def test_a_phase_sees_what_the_one_before_wrote(functions: ctypes.CDLL, team: int) -> None:
    for width in (1, 2, 7, 64):
        assert functions.team_relay(team, MAX_PHASES, width) == 2**MAX_PHASES


def _borrowing(functions: ctypes.CDLL, core: int, board: Any) -> int:
    team: int = functions.team_new_borrowing(MAX_PHASES, (ctypes.c_int32 * 1)(core), 1, board)
    return team


def test_an_idle_core_is_borrowed_and_one_in_use_is_not(functions: ctypes.CDLL) -> None:
    core = max(os.sched_getaffinity(0))
    board = (ctypes.c_uint32 * (core + 1))()
    team = _borrowing(functions, core, board)
    for is_in_use, num_members in ((0, 2), (1, 1), (0, 2)):
        board[core] = is_in_use
        assert functions.team_members_seen(team, 30) == num_members
    functions.team_delete(team)


def test_a_core_that_does_not_exist_is_not_borrowed(functions: ctypes.CDLL) -> None:
    board = (ctypes.c_uint32 * 1024)()
    team = _borrowing(functions, 1023, board)
    assert functions.team_members_seen(team, 5) == 1
    functions.team_delete(team)


def test_an_owner_may_want_its_core_back_at_any_time(functions: ctypes.CDLL) -> None:
    core = max(os.sched_getaffinity(0))
    board = (ctypes.c_uint32 * (core + 1))()
    team = _borrowing(functions, core, board)
    is_over = threading.Event()

    def own() -> None:
        while not is_over.wait(0.0002):
            board[core] ^= 1

    owner = threading.Thread(target=own)
    owner.start()
    assert _violations(functions, team, 3000, [3, 20, 7, 1]) == 0
    is_over.set()
    owner.join()
    functions.team_delete(team)


def test_helpers_share_the_work(functions: ctypes.CDLL) -> None:
    team = functions.team_new(3, 1)
    assert functions.team_members_seen(team, 30) == 3
    functions.team_delete(team)


def test_a_team_may_end_unused_or_while_helpers_are_late(functions: ctypes.CDLL) -> None:
    functions.team_delete(functions.team_new(4, 1))
    for _ in range(20):
        team = functions.team_new(4, MAX_PHASES)
        assert _violations(functions, team, 1, [2, 2], slow_us=500) == 0
        functions.team_delete(team)
