"""The event streams from a worker to its gateways: one feed per gateway, shared by all of its requests.

Owned by the worker's event loop. A gateway that stays away longer than the grace period, or does not read, is lost; the
worker then releases everything it holds for it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial

from common.lifecycle.timer import Timer
from common.messages.ids import GatewayId
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 1.0
"""A silent feed carries an empty frame this often, so that both ends notice a dead link."""

MAX_PENDING_EVENTS = 65_536
"""Events that a gateway may lag behind: about 64 per sequence at 1,000 sequences."""

GRACE_S = 5.0
"""How long a gateway may be disconnected before its requests are released."""


class _Feed:
    """Events of one gateway that have not been sent yet."""

    def __init__(self) -> None:
        self.pending: deque[pb.FeedEvent] = deque()
        self.wakeup = asyncio.Event()
        self.reader: object | None = None
        self.reaper: Timer | None = None


class FeedHub:
    """All feeds of one worker. The grace period is measured by `clock` (seconds), which may stand still."""

    def __init__(
        self,
        on_lost: Callable[[GatewayId], None],
        *,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._clock = clock
        self._feeds: dict[GatewayId, _Feed] = {}
        self._is_stalled = False
        self.num_steps = 0
        """Engine steps so far; travels with every frame to show progress."""

    def tell_stalled(self, is_stalled: bool) -> None:
        """Let every frame from now on say whether the engine is stalled, beginning with one at once."""
        self._is_stalled = is_stalled
        for feed in self._feeds.values():
            feed.wakeup.set()

    def push(self, gateway: GatewayId, event: pb.FeedEvent) -> None:
        """Queue an event for a gateway, connected or about to be."""
        feed = self._feeds.get(gateway)
        if feed is None:
            feed = self._feeds[gateway] = _Feed()
            self._start_grace(gateway, feed)
        if len(feed.pending) >= MAX_PENDING_EVENTS:
            logger.error("gateway does not read its feed", extra={"gateway": gateway})
            self._lose(gateway, feed)
            return
        feed.pending.append(event)
        feed.wakeup.set()

    async def serve(self, gateway: GatewayId) -> AsyncGenerator[pb.FeedFrame, None]:
        """Yield the frames of one gateway until it hangs up; a second reader replaces the first."""
        feed = self._feeds.setdefault(gateway, _Feed())
        reader = feed.reader = object()
        if feed.reaper is not None:
            feed.reaper.cancel()
            feed.reaper = None
        try:
            while self._feeds.get(gateway) is feed and feed.reader is reader:
                yield self._frame(feed)
                await self._wait(feed)
        finally:
            if feed.reader is reader:
                feed.reader = None
                if self._feeds.get(gateway) is feed:
                    self._start_grace(gateway, feed)

    def _frame(self, feed: _Feed) -> pb.FeedFrame:
        """Return what is ready, up to the first event that is large: several of these would not fit into a message."""
        feed.wakeup.clear()
        events: list[pb.FeedEvent] = []
        while feed.pending:
            events.append(feed.pending.popleft())
            if events[-1].tokens.prompt_logprobs:
                break
        return pb.FeedFrame(events=events, num_steps=self.num_steps, is_stalled=self._is_stalled)

    async def _wait(self, feed: _Feed) -> None:
        if feed.pending:
            return
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await feed.wakeup.wait()
        except TimeoutError:
            return  # an empty frame keeps the feed alive

    def _start_grace(self, gateway: GatewayId, feed: _Feed) -> None:
        feed.reaper = Timer(self._clock, self._grace_s, partial(self._lose, gateway, feed))

    def _lose(self, gateway: GatewayId, feed: _Feed) -> None:
        if self._feeds.get(gateway) is feed:
            del self._feeds[gateway]
            feed.reader = None
            feed.wakeup.set()
            self._on_lost(gateway)
