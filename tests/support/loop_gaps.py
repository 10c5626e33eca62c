"""How long an event loop is kept from its work by the work of its own process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 0.001


class Gaps:
    """`longest_s` is processor time of the whole process: what other processes take meanwhile does not count."""

    longest_s = 0.0
    num_ticks = 0


@asynccontextmanager
async def watched_loop() -> AsyncIterator[Gaps]:
    """Tick while the block runs."""
    gaps = Gaps()

    async def tick() -> None:
        last_s = time.process_time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.process_time()
            gaps.longest_s = max(gaps.longest_s, now_s - last_s)
            gaps.num_ticks += 1
            last_s = now_s

    task = asyncio.create_task(tick())
    try:
        yield gaps
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
