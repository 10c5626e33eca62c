"""Loops that run while a test looks at what they do."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop meanwhile; fail if it has ended by itself."""
    task = asyncio.create_task(work)
    yield
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
