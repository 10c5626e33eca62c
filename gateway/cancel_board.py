"""Ends requests by their id, at whichever gateway of the cluster they are.

A gateway that does not have the request asks all others by a notice in Redis; the one that has it ends it and says so
by a second notice, for which the asker waits. A notice that is lost (Redis was away) leaves the request running, and
its asker with the answer that nobody knows it: it asks again.
"""

import asyncio
import logging
from collections.abc import Callable

from common.broker.backoff import Retry
from common.broker.protocols import NoticeBoard
from common.errors import BrokerUnavailable
from common.messages.ids import ANYBODY, EntryId, RequestId, TenantId
from common.messages.notice import CancelNotice

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""So long may another gateway take to say that it has ended the request; it usually takes some milliseconds."""

BLOCK_S = 5.0


class CancelBoard:
    """One gateway's part. `cancel_here` ends a tenant's request of this gateway and returns whether there was one."""

    def __init__(self, board: NoticeBoard, cancel_here: Callable[[RequestId, TenantId], bool]) -> None:
        self._board = board
        self._cancel_here = cancel_here
        self._asked: dict[RequestId, set[asyncio.Future[None]]] = {}

    async def cancel(self, request: RequestId, tenant: TenantId = ANYBODY) -> bool:
        """End a tenant's request anywhere; return whether it was under way.

        Raises `BrokerUnavailable` if it is not here and the others cannot be asked.
        """
        if self._cancel_here(request, tenant):
            return True
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(request, set()).add(answer)
        try:
            await self._board.post(CancelNotice(request, tenant=tenant))
            async with asyncio.timeout(ANSWER_S):
                await answer
        except TimeoutError:
            return False
        finally:
            self._asked[request].discard(answer)
            if not self._asked[request]:
                del self._asked[request]
        return True

    async def watch(self) -> None:
        """Obey the others' notices until cancelled. While Redis is away there are none."""
        position: EntryId | None = None
        retry = Retry()
        while True:
            try:
                position = await self._read(position)
                retry.succeed()
            except BrokerUnavailable as error:
                logger.info("no notices of other gateways: %s", error)
                await retry.pause()

    async def _read(self, position: EntryId | None) -> EntryId:
        """Obey what came behind `position`; return the next one. None: begin now."""
        if position is None:
            return await self._board.newest()
        for posted in await self._board.read(position, BLOCK_S):
            position = posted.entry
            await self._obey(posted.notice)
        return position

    async def _obey(self, notice: CancelNotice) -> None:
        if notice.is_done:
            for answer in self._asked.get(notice.request, ()):
                if not answer.done():
                    answer.set_result(None)
        elif self._cancel_here(notice.request, notice.tenant):
            logger.info("cancelled for another gateway's client", extra={"request_id": notice.request})
            await self._confirm(notice.request)

    async def _confirm(self, request: RequestId) -> None:
        try:
            await self._board.post(CancelNotice(request, is_done=True))
        except BrokerUnavailable as error:
            logger.info("cancel not confirmed: %s", error, extra={"request_id": request})
