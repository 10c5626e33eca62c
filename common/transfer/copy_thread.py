"""Runs a blocking copy beside the event loop without ever outliving the coroutine that waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, work: Callable[[], T], interrupt: Callable[[], None]) -> T:
    """Return `work()`, run in a thread.

    When the caller is cancelled, `interrupt` tells the work to stop, and the cancellation is only passed on once the
    thread has ended (or never began): from then on it writes nowhere.
    """
    future = executor.submit(work)
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            interrupt()
            await _ended(waiter)
        raise


async def _ended(waiter: asyncio.Future[T]) -> None:
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:  # cancelled again: the promise still holds
            continue
    if not waiter.cancelled():
        waiter.exception()  # seen: an interrupted copy fails as it should
