"""The clock of expiries: runs with its process, stands still while that is paused and until it has read its sockets."""

import time

import pytest

from common.lifecycle.awake_clock import AwakeClock
from tests.support.background import running
from tests.support.polling import until


class Process:
    """A process whose time a test moves: `run` lets it tick, `pause` does not."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.clock = AwakeClock(tick_s=1.0, tolerance_s=1.0, settle_s=3.0, clock=lambda: self.now_s)
        self.clock.tick()

    def run(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self.now_s += 1.0
            self.clock.tick()

    def pause(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def process() -> Process:
    return Process()


def test_it_runs_while_the_process_runs(process: Process) -> None:
    process.run(5)
    assert process.clock.now() == 5.0
    process.pause(0.5)
    assert process.clock.now() == 5.5
    assert not process.clock.is_standing


def test_a_late_tick_is_no_pause(process: Process) -> None:
    process.pause(1.75)
    assert process.clock.now() == 1.75
    process.clock.tick()
    assert not process.clock.is_standing
    process.run(1)
    assert process.clock.now() == 2.75


def test_a_pause_counts_for_nothing_even_before_the_next_tick(process: Process) -> None:
    process.run(5)
    process.pause(0.5)
    before = process.clock.now()
    process.pause(15.0)
    assert process.clock.now() == before
    assert process.clock.is_standing


def test_after_a_pause_it_stands_until_the_sockets_are_read(process: Process) -> None:
    process.run(5)
    process.pause(15.0)
    process.clock.tick()
    process.run(2)
    assert process.clock.now() == 5.0
    assert process.clock.is_standing
    process.run(1)
    assert not process.clock.is_standing
    assert process.clock.now() == 5.0
    process.run(2)
    assert process.clock.now() == 7.0


def test_one_pause_after_the_other(process: Process) -> None:
    for _ in range(3):
        process.run(2)
        process.pause(15.0)
        process.clock.tick()
    assert process.clock.now() == 2.0  # each struck while the one before was digested
    process.run(4)
    assert process.clock.now() == 3.0


def test_it_never_goes_back(process: Process) -> None:
    process.pause(1.75)
    latest = process.clock.now()
    process.pause(15.0)
    process.clock.tick()
    for _ in range(5):
        process.run(1)
        assert process.clock.now() >= latest
        latest = process.clock.now()


async def test_it_ticks_by_itself() -> None:
    clock = AwakeClock(tick_s=0.02, tolerance_s=0.05, settle_s=0.1)
    async with running(clock.run()):
        await until(lambda: clock.now() > 0.1, "it runs")
        before = clock.now()
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is paused
        paused_until = time.monotonic()
        assert clock.now() == before
        await until(lambda: clock.now() > before, "it runs again")
        assert time.monotonic() - paused_until >= 0.1
