"""A reader that runs ahead of its consumer by a bounded number of events.

So a slow client gets several events in one write, and waiting for the next event can be interrupted without breaking
its source (to send a keep-alive).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Generic, Self, TypeVar

from common.errors import GenerationFailed
from gateway.patience import Patience

EventT = TypeVar("EventT")

CAPACITY = 256
"""Events read ahead; then the source is not asked for more until the client has taken some."""


class EventBuffer(Generic[EventT]):
    """Reads `source` in a task of its own while the `async with` block runs; leaving it closes the source."""

    def __init__(self, source: AsyncGenerator[EventT, None], max_wait_s: float, capacity: int = CAPACITY) -> None:
        self._source = source
        self._patience = Patience(max_wait_s)
        self._capacity = capacity
        self._ready: list[EventT] = []
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._has_news.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reader is not None  # __aenter__ has run
        self._patience.close()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        if not self._reader.cancelled():
            self._reader.exception()  # taken before, or of no interest any more

    async def take(self) -> list[EventT]:
        """Return all events that are ready, at least one; or none if nothing came for `max_wait_s`.

        Raises what the source raised, behind its last event; `GenerationFailed` if the source simply ended.
        """
        assert self._reader is not None  # inside the `async with` block
        try:
            with self._patience:
                await self._has_news.wait()
        except TimeoutError:
            return []
        self._has_news.clear()
        self._has_room.set()
        events, self._ready = self._ready, []
        if self._reader.done():
            self._has_news.set()
            if not events:
                self._reader.result()
                raise GenerationFailed("The answer ended without a reason.")
        return events

    async def _read(self) -> None:
        async with aclosing(self._source):
            async for event in self._source:
                self._ready.append(event)
                self._has_news.set()
                if len(self._ready) >= self._capacity:
                    self._has_room.clear()
                    await self._has_room.wait()
