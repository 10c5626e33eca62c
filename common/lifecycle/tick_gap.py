"""Tells a loop that it was paused: stopped, suspended or starved for longer than it can have slept.

Whoever was paused must not believe its own clock about others: it reads its sockets and waits one interval before it
expires anything.
"""


class TickGap:
    """Watches the times at which a periodic loop runs; owned by that loop. Times are seconds of a monotonic clock."""

    def __init__(self, interval_s: float, tolerance_s: float) -> None:
        assert interval_s > 0
        assert tolerance_s >= 0
        self._longest_s = interval_s + tolerance_s
        self._interval_s = interval_s
        self._last_s: float | None = None

    def observe(self, now_s: float) -> float:
        """Return for how many seconds the loop was paused before this tick, 0.0 if it was not."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or now_s - last_s <= self._longest_s:
            return 0.0
        return now_s - last_s - self._interval_s
