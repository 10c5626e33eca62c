"""How long to wait before trying again: exponential with jitter, so that a returning Redis is not stormed."""

import asyncio
import random as chance
from collections.abc import Callable, Iterator

FIRST_S = 0.05
LONGEST_S = 2.0


def backoff(random: Callable[[], float], first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> Iterator[float]:
    """Yield delays in seconds without end: each drawn from the upper half of a span that doubles up to `longest_s`.

    `random` returns numbers in [0, 1). A caller takes a new iterator after every success.
    """
    span_s = first_s
    while True:
        yield span_s * (1 + random()) / 2
        span_s = min(longest_s, 2 * span_s)


class Retry:
    """The pauses of one loop that asks Redis again and again; owned by that loop."""

    def __init__(self, random: Callable[[], float] = chance.random) -> None:
        self._random = random
        self._delays = backoff(random)
        self._is_failing = False

    async def pause(self) -> None:
        """Wait after a failure: longer from one to the next."""
        self._is_failing = True
        await asyncio.sleep(next(self._delays))

    def succeed(self) -> None:
        """Redis has answered: the next failure begins with the shortest wait."""
        if self._is_failing:
            self._is_failing = False
            self._delays = backoff(self._random)
