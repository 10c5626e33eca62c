"""Tells workers and Redis that a placement is over, until they know it.

A worker is told once per placement, whoever finds out first: the stream that ends, or an event that shows that the
worker still works on something outdated. What cannot be delivered (the worker is frozen, its link is cut) is sent again
when its feed is back, for a worker that resumes may have nothing to say for long and would compute for nobody.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from common.broker.backoff import backoff
from common.broker.protocols import JobQueue
from common.errors import BrokerUnavailable, PeerError
from common.messages.ids import ChoiceIndex, PlacementNumber, RequestId
from common.rpc.failures import reply_from
from gateway.feeds import Feeds
from gateway.streams import Source
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 2.0

WITHDRAW_TIMEOUT_S = 30.0
"""So long is Redis asked to forget a job. After that the worker that takes it in is told, when it says so."""

MAX_NOTICES = 10_000
"""Placements of which is known that their worker was told, or has to be: 500 bytes each."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A placement is over, or a `choice` of it alone; `source` should release it."""

    source: Source
    request: RequestId
    placement: PlacementNumber
    choice: ChoiceIndex | None = None


class Canceller:
    """Owned by the dispatcher; `close` ends what is under way."""

    def __init__(self, feeds: Feeds) -> None:
        self._feeds = feeds
        self._delivered: OrderedDict[Notice, bool] = OrderedDict()
        self._sending: set[Notice] = set()
        self._background: set[asyncio.Task[None]] = set()

    def cancel(self, notice: Notice) -> None:
        """Tell the worker, in the background; nothing happens if it was or is told already."""
        if notice in self._delivered:
            return
        self._delivered[notice] = False
        if len(self._delivered) > MAX_NOTICES:
            self._delivered.popitem(last=False)
        self._send(notice)

    def withdraw(self, jobs: JobQueue, request: RequestId, placement: PlacementNumber) -> None:
        """Remove the job from Redis, in the background."""
        self._spawn(self._withdraw(jobs, request, placement))

    def resume(self, source: Source) -> None:
        """Send what that worker has not been told: it can be talked to again."""
        for notice, is_delivered in self._delivered.items():
            if notice.source == source and not is_delivered:
                self._send(notice)

    async def close(self) -> None:
        """Let the last cancels go out, briefly."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=RPC_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _send(self, notice: Notice) -> None:
        if notice not in self._sending:
            self._sending.add(notice)
            self._spawn(self._deliver(notice))

    async def _deliver(self, notice: Notice) -> None:
        """Send until the worker answers, or until it cannot be talked to: `resume` goes on then."""
        try:
            for delay_s in backoff(random.random):
                if await self._is_told(notice) or not self._feeds.is_connected(notice.source):
                    return
                await asyncio.sleep(delay_s)
        finally:
            self._sending.discard(notice)

    async def _is_told(self, notice: Notice) -> bool:
        stub = self._feeds.stub(notice.source)
        if stub is None:
            return False
        message = pb.CancelRequest(request=notice.request, placement=notice.placement, choice=notice.choice)
        try:
            await reply_from(notice.source.worker, stub.Cancel(message, timeout=RPC_TIMEOUT_S))
        except PeerError as error:
            logger.info("cancel not delivered: %s", error, extra={"request_id": notice.request})
            return False
        if notice in self._delivered:
            self._delivered[notice] = True
        return True

    async def _withdraw(self, jobs: JobQueue, request: RequestId, placement: PlacementNumber) -> None:
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                for delay_s in backoff(random.random):
                    if await _is_withdrawn(jobs, request, placement):
                        return
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            logger.warning("job not withdrawn: Redis stays away", extra={"request_id": request})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _is_withdrawn(jobs: JobQueue, request: RequestId, placement: PlacementNumber) -> bool:
    try:
        await jobs.withdraw(request, placement)
    except BrokerUnavailable as error:
        logger.info("job not withdrawn: %s", error, extra={"request_id": request})
        return False
    return True
