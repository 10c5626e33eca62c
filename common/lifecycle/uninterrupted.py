"""Finishing what must be finished: clean-up that a cancellation may delay but never cut short."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def uninterrupted(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `coroutine` to its end even if the caller is cancelled meanwhile, then let the cancellation go on."""
    task = asyncio.ensure_future(coroutine)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
        except BaseException:
            if not task.done():
                raise
    if is_cancelled:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation outranks it
        raise asyncio.CancelledError
    return task.result()
