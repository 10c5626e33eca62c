"""The notice board of a cluster in memory: shared by the gateways of a test."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from common.broker.memory_stream import Bell, MemoryStream
from common.broker.policy import BrokerPolicy
from common.broker.protocols import PostedNotice
from common.messages.ids import EntryId
from common.messages.notice import CancelNotice


class MemoryNoticeBoard:
    """What gateways tell all gateways."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, policy: BrokerPolicy | None = None) -> None:
        self._clock: Final = clock
        self._policy: Final = policy or BrokerPolicy()
        self._notices: MemoryStream[CancelNotice] = MemoryStream()
        self._bell: Final = Bell()

    async def post(self, notice: CancelNotice) -> None:
        """Tell all gateways."""
        self._notices.append(notice, self._clock())
        while len(self._notices) > self._policy.max_notices:
            self._notices.delete(next(iter(self._notices)))
        self._bell.ring()

    async def newest(self) -> EntryId:
        """Return the entry behind which a reader begins that wants only what comes from now on."""
        return next(reversed(list(self._notices)), EntryId("0-0"))

    async def read(self, after: EntryId, block_s: float) -> list[PostedNotice]:
        """Return notices behind `after`, waiting up to `block_s` for the first one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + block_s
        while True:
            notices = self._notices.behind(after)
            left_s = deadline_s - loop.time()
            if notices or left_s <= 0:
                return [PostedNotice(entry, notice) for entry, notice in notices]
            await self._bell.wait(left_s)
