"""A worker's heartbeat: registers it, tells its load, and heals the registry after Redis lost everything."""

import asyncio
import logging
from collections.abc import Callable

from common.broker.protocols import Registry
from common.errors import BrokerUnavailable
from common.lifecycle.awake_clock import AwakeClock
from common.messages.registry import ModelCard, WorkerLoad, WorkerRecord

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.05
"""A change of load is told at once, but not more often than this: placement waits for freed pages."""

CARD_INTERVAL_S = 30.0


class Heart:
    """Beats for one worker until stopped; `touch` makes it beat soon.

    `on_found_again` is called when Redis answers after it had not.
    """

    def __init__(
        self,
        registry: Registry,
        record: WorkerRecord,
        card: ModelCard | None,
        load: Callable[[], WorkerLoad],
        clock: AwakeClock,
        on_found_again: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._record = record
        self._card = card
        self._load = load
        self._clock = clock
        self._on_found_again = on_found_again
        self._changed = asyncio.Event()
        self._card_age_s = CARD_INTERVAL_S
        self._is_failing = False
        self.is_connected = False

    def touch(self) -> None:
        """The load has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await self.beat()
            await self._pause()

    async def beat(self) -> None:
        """Beat once; a Redis that is away is logged, not raised."""
        self._changed.clear()
        try:
            await self._registry.beat(self._record, self._load())
            await self._publish_card()
            self.is_connected = True
            if self._is_failing:
                self._is_failing = False
                self._on_found_again()
        except BrokerUnavailable as error:
            if self._clock.is_standing:  # it is us who did not listen: the answer came in time for all we know
                self.touch()
                return
            if not self._is_failing:
                logger.warning("heartbeat failed: %s", error)
            self._is_failing = True
            self.is_connected = False
            self._card_age_s = CARD_INTERVAL_S

    async def leave(self) -> None:
        """Leave the registry; best effort."""
        try:
            await self._registry.leave(self._record.worker, self._record.epoch)
        except BrokerUnavailable as error:
            logger.warning("could not leave the registry: %s", error)

    async def _publish_card(self) -> None:
        if self._card is not None and self._card_age_s >= CARD_INTERVAL_S:
            await self._registry.publish_card(self._card)
            self._card_age_s = 0.0

    async def _pause(self) -> None:
        await asyncio.sleep(MIN_INTERVAL_S)
        self._card_age_s += MIN_INTERVAL_S
        try:
            async with asyncio.timeout(INTERVAL_S - MIN_INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            self._card_age_s += INTERVAL_S - MIN_INTERVAL_S
