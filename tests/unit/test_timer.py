"""Timers by a clock that stands still while the process is paused."""

import asyncio

from common.lifecycle.timer import Timer
from tests.support.polling import turns, until


class Clock:
    """Seconds, moved by a test."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.num_looks = 0

    def __call__(self) -> float:
        self.num_looks += 1
        return self.now_s


async def test_it_fires_once_when_its_time_is_over() -> None:
    loop, fired = asyncio.get_running_loop(), list[int]()
    Timer(loop.time, 0.001, lambda: fired.append(1))
    await until(lambda: fired, "it fires")
    await turns()
    assert fired == [1]


async def test_a_pause_does_not_count() -> None:
    clock, fired = Clock(), list[int]()
    Timer(clock, 0.001, lambda: fired.append(1))
    await until(lambda: clock.num_looks > 3, "it has looked again")
    assert not fired
    clock.now_s += 0.002
    await until(lambda: fired, "it fires")


async def test_it_can_be_cancelled_whenever_it_waits() -> None:
    clock, fired = Clock(), list[int]()
    early, late = (Timer(clock, 0.001, lambda: fired.append(1)) for _ in range(2))
    early.cancel()
    await until(lambda: clock.num_looks > 3, "the other one has looked again")
    late.cancel()
    clock.now_s += 1
    seen = clock.num_looks
    third = Timer(clock, 0.0, lambda: fired.append(3))
    await until(lambda: fired, "the next one fires")
    assert fired == [3]
    third.cancel()
    assert clock.num_looks == seen + 2
