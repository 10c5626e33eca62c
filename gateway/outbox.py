"""What is ready for a client and not taken yet: a producer runs ahead of its consumer by a bounded amount.

So a slow client gets several events in one write, and waiting for the next event can be interrupted without breaking
its source (to send a keep-alive). A client that keeps up gets what is ready together past the consumer, which sleeps
on: waking it costs as much as writing.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from gateway.patience import Patience

ItemT = TypeVar("ItemT")

CAPACITY = 256
"""Items made ahead; then the producer should wait until the client has taken them."""

CAPACITY_BYTES = 1 << 16
"""The same where items are bytes, which may be few or many."""


class Outbox(Generic[ItemT]):
    """Filled by one task, emptied by another. `max_wait_s` bounds the wait for the next item.

    `offer` brings items at once while the consumer waits for some, or returns False and brings none of them. `weigh`
    tells how much of the capacity an item takes, None: one.
    """

    def __init__(
        self,
        max_wait_s: float,
        capacity: int = CAPACITY,
        offer: Callable[[Sequence[ItemT]], bool] | None = None,
        weigh: Callable[[ItemT], int] | None = None,
    ) -> None:
        self._patience = Patience(max_wait_s)
        self._turn = _Turn.of_loop()
        self._capacity = capacity
        self._offer = offer
        self._weigh = weigh
        self._load = 0
        self.is_full = False
        """Whether the producer should wait for `room`."""
        self._is_offering = False
        self._ready: list[ItemT] = []
        self._news: asyncio.Future[None] | None = None
        """Awaited by the consumer; a future of its own costs 1 us per event less than an `asyncio.Event`."""
        self._room: asyncio.Future[None] | None = None
        """Awaited by the producer."""
        self.is_done = False
        """Whether the producer has returned or failed; what it left may still be taken."""

    def put(self, item: ItemT, *, is_last: bool = False) -> None:
        """Add an item; never waits. The last one is for the consumer alone."""
        self._ready.append(item)
        self._load += 1 if self._weigh is None else self._weigh(item)
        self.is_full = self._load >= self._capacity
        if self._offer is None or is_last:
            self._tell()
        elif self._news is not None and not self._is_offering:
            self._is_offering = True  # with what else becomes ready in this turn of the event loop
            self._turn.add(self)

    async def room(self) -> None:
        """Return when everything that was ready has been taken."""
        if self._ready:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    async def take(self) -> list[ItemT]:
        """Return all items that are ready; none if nothing came for `max_wait_s`, or if the producer is done."""
        if not self._ready and not self.is_done:
            self._news = asyncio.get_running_loop().create_future()
            try:
                with self._patience:
                    await self._news
            except TimeoutError:
                return []
            finally:
                self._news = None
        return self._empty()

    def finish(self) -> None:
        """The producer adds nothing more."""
        self.is_done = True
        self._tell()

    def close(self) -> None:
        """Stop the timer; the consumer takes nothing more."""
        self._patience.close()

    def bring(self) -> None:
        """Offer what is ready, if the consumer waits for it; for the end of the turn alone."""
        self._is_offering = False
        if self._news is None or self._news.done() or not self._ready or self._offer is None:
            return
        if self._offer(self._ready):
            self._empty()
            self._patience.renew()
        else:
            self._tell()

    def _empty(self) -> list[ItemT]:
        items, self._ready, self._load, self.is_full = self._ready, [], 0, False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return items

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class _Turn:
    """The outboxes of one event loop that something was put into in its present turn: all of them are brought in one
    call behind it."""

    _turns: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "_Turn"]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._outboxes: list[Outbox[Any]] = []

    @classmethod
    def of_loop(cls) -> "_Turn":
        """Return that of the running loop."""
        loop = asyncio.get_running_loop()
        turn = cls._turns.get(loop)
        if turn is None:
            turn = cls._turns[loop] = cls()
        return turn

    def add(self, outbox: Outbox[Any]) -> None:
        """Bring it at the end of the turn."""
        if not self._outboxes:
            asyncio.get_running_loop().call_soon(self._bring_all)
        self._outboxes.append(outbox)

    def _bring_all(self) -> None:
        outboxes, self._outboxes = self._outboxes, []
        for outbox in outboxes:
            try:
                outbox.bring()
            except Exception as error:  # noqa: BLE001 - it is one client's: the others get what is theirs
                problem = {"message": "an event could not be offered", "exception": error}
                asyncio.get_running_loop().call_exception_handler(problem)
