"""The clock by which a process lets others expire: it stands still while the process itself could not run.

Whoever was stopped, suspended or starved finds that seconds have passed in which others may well have written. With
this clock none of those count, and after the pause it stands still for one more interval, in which the sockets are
read. So every lease, grace period and watch that is measured by it keeps the rule of `tick_gap` by itself.
"""

import asyncio
import math
import time
from collections.abc import Callable

from common.lifecycle.tick_gap import TickGap


class AwakeClock:
    """Seconds since it was made, pauses left out. Owned by one event loop, on which `run` must run.

    It ticks every `tick_s`; a tick that comes more than `tolerance_s` late ends a pause, after which the clock stands
    still for another `settle_s`.
    """

    def __init__(
        self,
        *,
        tick_s: float = 0.25,
        tolerance_s: float = 0.5,
        settle_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tick_s = tick_s
        self._longest_s = tick_s + tolerance_s
        self._settle_s = settle_s
        self._clock = clock
        self._gap = TickGap(tick_s, tolerance_s)
        self._ticked_at = clock()
        self._moves_from = -math.inf
        self._at_tick_s = 0.0
        self._latest_s = 0.0

    @property
    def is_standing(self) -> bool:
        """Whether the process was paused just now and may not have read yet what others wrote meanwhile."""
        now = self._clock()
        return now < self._moves_from or now - self._ticked_at > self._longest_s

    def now(self) -> float:
        """Return the seconds that this process was awake; never less than before."""
        if not self.is_standing:
            moved_s = self._clock() - max(self._ticked_at, self._moves_from)
            self._latest_s = max(self._latest_s, self._at_tick_s + moved_s)
        return self._latest_s

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(self._tick_s)

    def tick(self) -> None:
        """Notice whether the process was paused since the last tick."""
        self._at_tick_s = self.now()
        now = self._clock()
        if self._gap.observe(now):
            self._moves_from = now + self._settle_s
        self._ticked_at = now
