"""An answer on its way to one client: what is ready leaves together, as fast as the client takes it."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Generic, Protocol, TypeVar

from gateway.outbox import Outbox

ItemT = TypeVar("ItemT", contravariant=True)
AnyT = TypeVar("AnyT")


class Carrier(Protocol[ItemT]):
    """Brings items to a client. Raises `ConnectionError` when the client is gone or takes nothing any more."""

    async def carry(self, items: Sequence[ItemT], *, is_last: bool) -> None:
        """Bring items; returns once there is room for more. Nothing follows the last ones."""

    async def reassure(self) -> None:
        """Nothing has come for a while: tell the client, if it needs to be told, that more may come."""


class Readable(Protocol):
    """What is delivered: an `Answer`."""

    @property
    def is_over(self) -> bool:
        """Whether it has been made to its end."""

    async def read(self, max_silence_s: float) -> None:
        """Make it."""


async def deliver(carrier: Carrier[AnyT], outbox: Outbox[AnyT], answer: Readable, max_silence_s: float) -> None:
    """Bring everything up to the answer's end, or raise what reading the answer raises, behind what came before it.

    The sink of the answer puts its items into the outbox.
    """
    async with Filling(outbox, answer.read(max_silence_s)) as reading:
        while True:
            items = await outbox.take()
            is_over = answer.is_over  # now: while these items are carried, others may become ready
            if items:
                await carrier.carry(items, is_last=is_over)
            elif not outbox.is_done:
                await carrier.reassure()
            if is_over:
                return
            if not items and outbox.is_done:
                try:
                    reading.result()
                finally:
                    del reading  # its error leads here: a ring of garbage per refusal, with all that belonged to it


class Filling(Generic[AnyT]):
    """Run `work`, which fills the outbox, in a task of its own while the block runs; leaving it ends it."""

    def __init__(self, outbox: Outbox[AnyT], work: Coroutine[object, object, None]) -> None:
        self._outbox = outbox
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "asyncio.Task[None]":
        task, outbox = asyncio.create_task(self._work), self._outbox
        task.add_done_callback(lambda _: outbox.finish())
        self._task = task
        return task

    async def __aexit__(self, *_: object) -> None:
        task, self._task = self._task, None  # its error may lead here: a ring of garbage
        assert task is not None
        self._outbox.close()
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # raised before by whoever asked the task, or of no interest any more
