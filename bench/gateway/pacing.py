"""When scripted tokens are written: as fast as they are taken, or each stream at a steady rate."""

import asyncio
import time
from collections import defaultdict
from typing import Protocol

NUM_PHASES = 8
"""Streams of one phase get their tokens at the same moment, like the sequences of one worker's batch."""

BURST = 16
"""Tokens of one stream that are written together where nothing paces them."""


class Outlet(Protocol):
    """One scripted answer on its way."""

    seed: int
    """Tells the answer apart, as its client has numbered it."""

    def write(self, num_tokens: int) -> bool:
        """Write up to so many tokens more; return whether some are left."""


class Pacer:
    """Writes a token of each of its outlets every `interval_s`, and notes when: `written_s[seed]` has the monotonic
    time of every token, in order. `flush` is called when the tokens of a phase have been written."""

    def __init__(self) -> None:
        self.interval_s: float | None = None
        """None: outlets write at their own pace, and nothing is noted."""
        self.written_s: defaultdict[int, list[float]] = defaultdict(list)
        self.removed_s: dict[int, float] = {}
        """When an answer was given up, by its seed."""
        self._phases: list[set[Outlet]] = [set() for _ in range(NUM_PHASES)]
        self._num_added = 0
        self._task: asyncio.Task[None] | None = None

    def add(self, outlet: Outlet) -> None:
        """Pace an outlet from now on."""
        self._phases[self._num_added % NUM_PHASES].add(outlet)
        self._num_added += 1

    def remove(self, outlet: Outlet) -> None:
        """Write no more of it."""
        for phase in self._phases:
            if outlet in phase:
                phase.discard(outlet)
                self.removed_s[outlet.seed] = time.monotonic()

    def has(self, seed: int) -> bool:
        """Whether the answer of that seed is on its way."""
        return any(outlet.seed == seed for phase in self._phases for outlet in phase)

    def start(self, interval_s: float | None) -> None:
        """Begin a measurement."""
        self.stop()
        self.interval_s = interval_s
        self.written_s.clear()
        if interval_s is not None:
            self._task = asyncio.create_task(self._run(interval_s / NUM_PHASES), name="pacer")

    def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, step_s: float) -> None:
        due_s = time.monotonic()
        number = 0
        while True:
            due_s += step_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._write(self._phases[number % NUM_PHASES])
            number += 1

    def _write(self, phase: set[Outlet]) -> None:
        now = time.monotonic()
        for outlet in list(phase):
            self.written_s[outlet.seed].append(now)
            if not outlet.write(1):
                phase.discard(outlet)
