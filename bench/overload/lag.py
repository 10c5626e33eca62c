"""How late the client is itself: it is one event loop beside all that it measures, and what it is late is in every
figure."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 0.005


def noticed_late(late_s: float) -> list[float]:
    """Return by how much answers were noticed late, one per tick, that came while the loop was late by `late_s`."""
    return [late_s - missed * TICK_S for missed in range(int(late_s / TICK_S) + 1)]


@asynccontextmanager
async def watched_lag() -> AsyncIterator[list[float]]:
    """While the block runs, collect by how many seconds an answer that came then was noticed late, once per tick."""
    late_s: list[float] = []

    async def tick() -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s.extend(noticed_late(max(0.0, time.perf_counter() - due_s)))

    task = asyncio.create_task(tick())
    try:
        yield late_s
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
