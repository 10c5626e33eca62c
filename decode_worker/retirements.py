"""Deletes our prefill tasks, as their author: at once, or as soon as Redis takes it.

A task that nobody deletes is of no use to anybody, but stands in the stream, and is delivered, for minutes.
"""

import asyncio
import logging

from common.broker.protocols import TaskQueue
from common.errors import BrokerUnavailable
from common.messages.ids import EntryId

logger = logging.getLogger(__name__)

RETRY_S = 0.5


class Retirements:
    """The tasks that are over and not deleted yet. Whoever leaves them behind leaves orphans, which claimers delete."""

    def __init__(self, tasks: TaskQueue) -> None:
        self._tasks = tasks
        self._pending: set[EntryId] = set()
        self._wakeup = asyncio.Event()

    def add(self, entry: EntryId) -> None:
        """Queue a task."""
        self._pending.add(entry)
        self._wakeup.set()

    async def retire(self, entry: EntryId) -> None:
        """Delete a task, or queue it while Redis is away."""
        try:
            await self._tasks.delete(entry)
        except BrokerUnavailable as error:
            logger.warning("could not delete a prefill task yet: %s", error)
            self.add(entry)

    async def run(self) -> None:
        """Delete what is queued until cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            try:
                await self._flush()
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)
                self._wakeup.set()

    async def _flush(self) -> None:
        for entry in list(self._pending):
            await self._tasks.delete(entry)
            self._pending.discard(entry)
