"""Waiting for a state that nobody announces: looks again until it is there, and fails at a deadline."""

import asyncio
from collections.abc import Awaitable, Callable

LOOK_S = 0.005


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], deadline_s: float = 5.0) -> None:
    """Return when `condition` holds; raise `TimeoutError` after `deadline_s`."""
    async with asyncio.timeout(deadline_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(LOOK_S)
