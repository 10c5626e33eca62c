"""When an engine counts as stalled: busy, and nothing completed for too long."""

import asyncio

from common.runtime.engine import Progress
from common.runtime.stall import HOPELESS_FACTOR, StallWatch, Verdict, watch_engine
from tests.support.background import running
from tests.support.polling import until

STALL_S = 10.0


def busy(num_completed: int) -> Progress:
    return Progress(is_busy=True, num_completed=num_completed)


def idle(num_completed: int) -> Progress:
    return Progress(is_busy=False, num_completed=num_completed)


def verdicts(*looks: tuple[float, Progress]) -> list[Verdict]:
    watch = StallWatch(STALL_S)
    return [watch.judge(progress, now_s) for now_s, progress in looks]


def test_a_busy_engine_that_completes_nothing_is_stalled_then_hopeless() -> None:
    times = (0.0, 9.9, 10.0, 59.9, 60.0)
    assert HOPELESS_FACTOR == 6
    assert verdicts(*((now_s, busy(3)) for now_s in times)) == [
        Verdict.MOVING,
        Verdict.MOVING,
        Verdict.STALLED,
        Verdict.STALLED,
        Verdict.HOPELESS,
    ]


def test_one_completed_step_is_enough() -> None:
    assert verdicts((0.0, busy(3)), (15.0, busy(3)), (16.0, busy(4)), (25.0, busy(4)), (26.0, busy(4))) == [
        Verdict.MOVING,
        Verdict.STALLED,
        Verdict.MOVING,
        Verdict.MOVING,
        Verdict.STALLED,
    ]


def test_an_idle_engine_is_never_stalled_and_begins_anew() -> None:
    assert verdicts((0.0, idle(3)), (100.0, idle(3)), (101.0, busy(3)), (109.0, busy(3)), (110.5, busy(3))) == [
        Verdict.MOVING,
        Verdict.MOVING,
        Verdict.MOVING,
        Verdict.MOVING,
        Verdict.STALLED,
    ]


async def test_every_change_is_told_once() -> None:
    now_s = 0.0
    progress, told = busy(1), list[Verdict]()
    async with running(watch_engine(lambda: progress, 0.01, lambda: now_s, told.append)):
        await asyncio.sleep(0)
        now_s = 0.02
        await until(lambda: told == [Verdict.STALLED], "the stall is told")
        now_s = 0.03
        progress = busy(2)
        await until(lambda: told == [Verdict.STALLED, Verdict.MOVING], "so is its end")
        now_s = 0.5
        await until(lambda: told == [Verdict.STALLED, Verdict.MOVING, Verdict.HOPELESS], "it is hopeless")
