"""Stop strings in a text that arrives in pieces, wherever the pieces are cut.

The first stop string to be complete wins; among those that end at the same character the longest does. So the result
depends on the text alone.
"""

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Passes text on up to the first stop string, or with it if `shows_stop`; holds back only what may still become
    one."""

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._shows_stop = shows_stop
        self._beginnings = _beginnings_of(self._stops)
        self._held = ""
        self.has_matched = False
        """Whether a stop string is complete; everything behind it is dropped."""

    def push(self, text: str) -> str:
        """Return the text that is certainly shown."""
        if self.has_matched:
            return ""
        if not self._held and self._beginnings.isdisjoint(text):
            return text
        text = self._held + text
        found = self._match(text)
        self.has_matched = found is not None
        if found is not None:
            self._held = ""
            return text[: found[0] if self._shows_stop else found[1]]
        shown = text[: len(text) - self._num_held(text)]
        self._held = text[len(shown) :]
        return shown

    def finish(self) -> str:
        """Return what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> tuple[int, int] | None:
        """Return where the winning stop string ends and starts."""
        return min(((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


@lru_cache
def _beginnings_of(stops: tuple[str, ...]) -> frozenset[str]:
    """Return the first characters; one set for all answers with these stop strings, so that it stays in the cache."""
    return frozenset(stop[0] for stop in stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning, but not all, of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
