"""Waiting for a state that nobody announces: looks again until it is there, and fails naming it at a deadline."""

import asyncio
from collections.abc import Awaitable, Callable

LOOK_S = 0.002


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]],
    what: str | Callable[[], str] = "what the test waits for",
    deadline_s: float = 5.0,
    *,
    look_s: float = LOOK_S,
) -> None:
    """Return when `condition` holds; fail after `deadline_s`, naming `what` (called only then).

    It looks again every `look_s`: more rarely where a look costs others something.
    """
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                holds = condition()
                if await holds if isinstance(holds, Awaitable) else holds:
                    return
                await asyncio.sleep(look_s)
    except TimeoutError as error:
        raise AssertionError(f"not within {deadline_s} s: {what if isinstance(what, str) else what()}") from error


async def turns(count: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
