"""Bringing an answer to its client: all of it, also what becomes ready while something is carried."""

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest

from gateway.delivery import deliver
from gateway.outbox import Outbox


class Tail:
    """An answer that is over as soon as its last item has been made."""

    def __init__(self, outbox: Outbox[str], may_end: asyncio.Event, failure: Exception | None = None) -> None:
        self._outbox = outbox
        self._may_end = may_end
        self._failure = failure
        self.is_over = False

    async def read(self, max_silence_s: float) -> None:
        self._outbox.put("a")
        await self._may_end.wait()
        self._outbox.put("b")
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        self._outbox.put("end")
        self.is_over = True


class SlowCarrier:
    """Carries the first item until everything else is ready."""

    def __init__(self, may_end: asyncio.Event) -> None:
        self._may_end = may_end
        self.carried: list[str] = []
        self.lasts: list[bool] = []

    async def carry(self, items: Sequence[str], *, is_last: bool) -> None:
        self.carried += items
        self.lasts.append(is_last)
        self._may_end.set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def reassure(self) -> None:
        raise AssertionError("nothing is late here")


async def test_what_becomes_ready_meanwhile_is_carried_too() -> None:
    may_end, outbox = asyncio.Event(), Outbox[str](60)
    carrier, answer = SlowCarrier(may_end), Tail(outbox, may_end)
    await asyncio.wait_for(deliver(carrier, outbox, answer, 60), 5)
    assert carrier.carried == ["a", "b", "end"]
    assert carrier.lasts == [False, True]


async def test_a_failure_comes_behind_what_was_ready_before_it() -> None:
    may_end, outbox = asyncio.Event(), Outbox[str](60)
    carrier, answer = SlowCarrier(may_end), Tail(outbox, may_end, ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await asyncio.wait_for(deliver(carrier, outbox, answer, 60), 5)
    assert carrier.carried == ["a", "b"]


async def test_a_failure_leaves_nothing_for_the_garbage_collector() -> None:
    may_end, outbox = asyncio.Event(), Outbox[str](60)
    carrier, answer = SlowCarrier(may_end), Tail(outbox, may_end, ValueError("x"))
    found = weakref.ref(carrier)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="x"):
            await deliver(carrier, outbox, answer, 60)
        del carrier, answer
        assert found() is None
    finally:
        gc.enable()
