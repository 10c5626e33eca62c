"""Which sources have said nothing for too long, judged by one look at all of them per interval.

A process that was paused itself (stopped, suspended, starved) has no right to judge: what others said meanwhile waits
in its sockets. It finds that out by the time between two looks, reads first, and judges again `GRACE_S` later.
"""

from typing import Generic, TypeVar

from common.lifecycle.tick_gap import TickGap

LOOK_S = 0.5
TOLERANCE_S = 1.0
"""How late a look may come before it counts as a pause: more than a busy event loop delays it."""

GRACE_S = 2.0
"""After a pause: two empty frames of every living worker arrive in this time, even if all processes were paused."""

SourceT = TypeVar("SourceT")


class SilenceWatch(Generic[SourceT]):
    """Times at which sources were heard, in seconds of a monotonic clock. Its owner calls `look` every `LOOK_S`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._gap = TickGap(LOOK_S, TOLERANCE_S)
        self._heard_at: dict[SourceT, float] = {}
        self._grace_until_s = float("-inf")

    def heard(self, source: SourceT, now_s: float) -> None:
        """Note a sign of life, or that the source is listened to from now on."""
        self._heard_at[source] = now_s

    def forget(self, source: SourceT) -> None:
        """Judge it no longer; nothing happens if it is not known."""
        self._heard_at.pop(source, None)

    def look(self, now_s: float) -> list[SourceT]:
        """Return the sources that were silent for longer than the limit."""
        if self.was_paused(now_s):
            return []
        return [source for source, heard_at in self._heard_at.items() if now_s - heard_at >= self._limit_s]

    def was_paused(self, now_s: float) -> bool:
        """Whether this process was paused a moment ago: what seems to have broken then may be its own doing."""
        if self._gap.observe(now_s) > 0:
            self._grace_until_s = now_s + GRACE_S
        return now_s < self._grace_until_s
