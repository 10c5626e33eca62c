"""What each decode worker has proved to this gateway lately: that tokens come out of it.

Written by the canary and by every answer of two or more tokens that ended well; read by placement and by readiness.
Words about a worker, each the last one until the next:

proved    Tokens came back. It counts for readiness for `window_s`, and the worker is trusted.
busy      It had no room for a canary, or did not come to it in time, but works on other requests. That is no proof and
          no failure: what it proved before counts on, for at most `BUSY_S` after the first such word.
silent    A canary did not come back, and nothing shows that the worker does anything. It is not proposed for work
          (unless nobody who is open is trusted) until it is proved, or busy after all. A job that waits in Redis goes
          to whoever has room first, and may go to it.
failed    A canary came back as an error, or it was busy for too long: as silent, but only a proof ends it.

A worker that has not been tried yet is trusted, but proves nothing. One owner: the gateway's event loop.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gateway.engine import Readiness
from gateway.streams import Source

logger = logging.getLogger(__name__)

BUSY_S = 300.0
"""As long as the gateway waits for the next word about a request (`max_silence_s`)."""

MAX_NAMED = 4
"""So many workers does the reason for not being ready name."""


@dataclass(slots=True)
class _Standing:
    """When it proved itself, since when it is only busy, and when that was seen last (seconds); why it is doubted, and
    whether nothing but a proof ends that."""

    proved_at: float | None = None
    busy_since: float | None = None
    busy_at: float | None = None
    doubt: str = ""
    needs_proof: bool = False


class Proofs:
    """The standing of every decode worker at one gateway. A proof counts for `window_s`."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._began_at = clock()
        self._standings: dict[Source, _Standing] = {}

    def note(self, source: Source) -> None:
        """Tokens came back from it."""
        former = self._standings.get(source)
        self._standings[source] = _Standing(proved_at=self._clock())
        if former is not None and former.doubt:
            logger.warning("%s is trusted again", source.worker)

    def excuse(self, source: Source) -> None:
        """It is busy with other requests. Too long without any proof is doubted."""
        standing = self._standings.setdefault(source, _Standing())
        now = self._clock()
        if standing.busy_since is None:
            standing.busy_since = now
        if now - standing.busy_since > BUSY_S:
            self.fail(source, f"works, but no canary has come back for more than {BUSY_S:.0f} s")
        elif not standing.needs_proof:
            standing.busy_at = now
            if standing.doubt:
                standing.doubt = ""
                logger.warning("%s is trusted again: it works on other requests", source.worker)

    def miss(self, source: Source, reason: str) -> None:
        """A canary did not come back from it, and nothing else either."""
        self._doubt(source, reason)

    def fail(self, source: Source, reason: str) -> None:
        """It cannot do what it should, however busy it is."""
        self._doubt(source, reason).needs_proof = True

    def lapse(self, source: Source) -> None:
        """It cannot take work now. What it proved before that says nothing about how it comes back; a doubt stays."""
        standing = self._standings.get(source)
        if standing is not None:
            standing.proved_at = standing.busy_since = standing.busy_at = None

    def retain(self, sources: Collection[Source]) -> None:
        """Forget all but these incarnations."""
        for source in self._standings.keys() - set(sources):
            del self._standings[source]

    def is_trusted(self, source: Source) -> bool:
        """Whether it may get work: nothing is held against it."""
        standing = self._standings.get(source)
        return standing is None or not standing.doubt

    def age_s(self, source: Source) -> float | None:
        """Return how long ago it proved itself, None if it has not."""
        standing = self._standings.get(source)
        proved_at = None if standing is None else standing.proved_at
        return None if proved_at is None else self._clock() - proved_at

    def readiness(self, sources: Sequence[Source]) -> Readiness:
        """Return whether any of these workers, which are those that could take work, has proved itself lately."""
        if any(self._counts(source) for source in sources):
            return Readiness(is_ready=True)
        named = [self._described(source) for source in sources[:MAX_NAMED]]
        return Readiness(
            is_ready=False, reason=f"no canary has come back for {self._silence_s(sources):.0f} s: " + ", ".join(named)
        )

    def _doubt(self, source: Source, reason: str) -> _Standing:
        standing = self._standings.setdefault(source, _Standing())
        if not standing.doubt:
            logger.warning("%s is not trusted any more: %s", source.worker, reason)
        standing.doubt = reason
        standing.busy_at = None
        return standing

    def _counts(self, source: Source) -> bool:
        standing = self._standings.get(source)
        if standing is None or standing.doubt:
            return False
        oldest = self._clock() - self._window_s
        return any(at is not None and at >= oldest for at in (standing.proved_at, standing.busy_at))

    def _silence_s(self, sources: Sequence[Source]) -> float:
        """Return for how long nobody has proved anything."""
        ages = [age_s for source in sources if (age_s := self.age_s(source)) is not None]
        return min(ages, default=self._clock() - self._began_at)

    def _described(self, source: Source) -> str:
        standing = self._standings.get(source)
        doubt = "" if standing is None else standing.doubt
        return f"{source.worker} ({doubt})" if doubt else source.worker
