"""Waiting for what must become true: looks often, gives up loudly. Nothing else in a test waits by time."""

import asyncio
from collections.abc import Callable

LOOK_S = 0.002
DEADLINE_S = 5.0


async def eventually(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return when `condition` holds; fail naming `what` after `deadline_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while not condition():
        assert loop.time() < deadline, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(LOOK_S)


async def turns(count: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
