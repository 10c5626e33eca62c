"""Does the engine of a worker get on with the work it has? Owned by the worker's event loop.

An engine that is busy and completes nothing for `stall_s` is stalled: its work moves to other workers, and new work
does not come. If it stays so for `HOPELESS_FACTOR` times as long, nothing but a fresh process will help. Its very first
steps, which may be slow for once, are not judged (`common/runtime/warm_up.py`).
"""

import asyncio
import enum
from collections.abc import Callable

from common.runtime.engine import Progress

HOPELESS_FACTOR = 6
LOOKS_PER_STALL = 10
MAX_LOOK_S = 1.0


class Verdict(enum.Enum):
    """What an engine's progress means."""

    MOVING = "moving"
    """Idle counts as well."""
    STALLED = "stalled"
    HOPELESS = "hopeless"


class StallWatch:
    """Judges one engine. Times are seconds of a clock that stands still while the process is paused."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._num_completed = -1
        self._moved_at_s = 0.0

    def judge(self, progress: Progress, now_s: float) -> Verdict:
        """Take in how far the engine is now."""
        if not progress.is_busy or progress.num_completed != self._num_completed:
            self._num_completed = progress.num_completed
            self._moved_at_s = now_s
        still_s = now_s - self._moved_at_s
        if still_s >= self._stall_s * HOPELESS_FACTOR:
            return Verdict.HOPELESS
        return Verdict.STALLED if still_s >= self._stall_s else Verdict.MOVING


async def watch_engine(
    progress: Callable[[], Progress], stall_s: float, clock: Callable[[], float], on_verdict: Callable[[Verdict], None]
) -> None:
    """Judge an engine until cancelled; `on_verdict` hears of every change. `clock` stands still while we are paused."""
    watch, last = StallWatch(stall_s), Verdict.MOVING
    while True:
        verdict = watch.judge(progress(), clock())
        if verdict is not last:
            last = verdict
            on_verdict(verdict)
        await asyncio.sleep(min(MAX_LOOK_S, stall_s / LOOKS_PER_STALL))
