"""Tells the registry what a worker's prefix cache has, so that conversations come back to it; owned by the event loop.

Only changes travel. Whoever keeps them compares how many there should be, so that a loss on either side, or a message
that arrived without its answer, is noticed with the next one and everything is told again.
"""

import asyncio
import logging
from itertools import islice

from common.broker.protocols import PrefixIndex, PrefixNews
from common.cache.journal import PrefixJournal
from common.errors import BrokerUnavailable
from common.messages.ids import Epoch, WorkerId

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
"""A reader of an answer needs longer to ask the next question."""

CHECK_INTERVAL_S = 5.0
"""So often something is told even if nothing has changed, to notice a loss."""

MAX_CHANGES = 1000
"""In one message."""

MAX_TOLD = 32768
"""Two million tokens of one worker, in 2 MB of Redis; of more the oldest are withdrawn."""


class PrefixTeller:
    """Tells of one worker's cache until stopped."""

    def __init__(
        self, index: PrefixIndex, worker: WorkerId, epoch: Epoch, journal: PrefixJournal, max_told: int = MAX_TOLD
    ) -> None:
        self._index = index
        self._worker = worker
        self._epoch = epoch
        self._journal = journal
        self._max_told = max_told
        self._present: dict[bytes, None] = {}
        self._told: dict[bytes, None] = {}
        self._changes: dict[bytes, bool] = {}
        """What was not told yet; whether it is there."""

    async def run(self) -> None:
        """Tell until cancelled; a Redis that is away is told later."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        while True:
            try:
                is_due = loop.time() - checked_at >= CHECK_INTERVAL_S
                if await self.tell(is_check=is_due):
                    checked_at = loop.time()
            except BrokerUnavailable as error:
                logger.debug("prefixes not told: %s", error)
            await asyncio.sleep(INTERVAL_S)

    async def tell(self, *, is_check: bool = False) -> bool:
        """Tell some of what has changed, or how many there are if it `is_check`; return whether anything was told."""
        self._read_journal()
        news, batch = self._news()
        if not (news.added or news.removed or is_check):
            return False
        if await self._index.tell(self._worker, self._epoch, news):
            for name in news.removed:
                del self._told[name]
            self._told.update(dict.fromkeys(news.added))
            for name, is_there in batch.items():
                if self._changes.get(name) is is_there:
                    del self._changes[name]
        else:
            self._told = {}
            skipped = max(0, len(self._present) - self._max_told)
            self._changes = dict.fromkeys(islice(self._present, skipped, None), True)
        return True

    def _read_journal(self) -> None:
        for name, is_there in self._journal.take():
            if is_there:
                self._present[name] = None
                self._changes[name] = True
            elif name in self._present:  # of those that left many were never told of
                del self._present[name]
                self._changes[name] = False

    def _news(self) -> tuple[PrefixNews, dict[bytes, bool]]:
        batch = dict(islice(self._changes.items(), MAX_CHANGES))
        added = [name for name, is_there in batch.items() if is_there and name not in self._told]
        removed = {name: None for name, is_there in batch.items() if not is_there and name in self._told}
        num_surplus = len(self._told) + len(added) - len(removed) - self._max_told
        oldest = (name for name in self._told if name not in removed)
        surplus = list(islice(oldest, max(0, num_surplus)))
        return PrefixNews(len(self._told), added, [*removed, *surplus]), batch
