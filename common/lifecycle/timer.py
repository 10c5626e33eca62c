"""A timer by a clock that may stand still, so that nothing expires because this process was paused."""

import asyncio
from collections.abc import Callable

LOOK_S = 0.01
"""While the clock stands still nobody looks at it more often than this."""


class Timer:
    """Calls back once `delay_s` have passed by `clock` (seconds), unless it is cancelled before. For one event loop."""

    def __init__(self, clock: Callable[[], float], delay_s: float, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._due_s = clock() + delay_s
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(delay_s, self._look)

    def cancel(self) -> None:
        """Never call back."""
        self._handle.cancel()

    def _look(self) -> None:
        left_s = self._due_s - self._clock()
        if left_s <= 0:
            self._callback()
        else:
            self._handle = self._loop.call_later(max(left_s, LOOK_S), self._look)
