"""What is ready for a client: taken together, bounded, and never lost with the end of its producer."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.delivery import Filling
from gateway.outbox import Outbox

LONG_S = 5.0


async def test_what_is_ready_is_taken_together() -> None:
    outbox: Outbox[int] = Outbox(LONG_S)
    outbox.put(1)
    outbox.put(2)
    assert await outbox.take() == [1, 2]
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(3)
    outbox.put(4)
    assert await taking == [3, 4]
    outbox.close()


async def test_silence_is_an_empty_take_and_loses_nothing() -> None:
    outbox: Outbox[int] = Outbox(0.01)
    assert await outbox.take() == []
    outbox.put(1)
    assert await outbox.take() == [1]
    outbox.close()


async def test_the_producer_waits_for_a_slow_consumer() -> None:
    outbox: Outbox[int] = Outbox(LONG_S, capacity=2)
    made: list[int] = []

    async def produce() -> None:
        for number in range(6):
            made.append(number)
            outbox.put(number)
            if outbox.is_full:
                await outbox.room()

    async with Filling(outbox, produce()) as producing:
        taken: list[int] = []
        while not outbox.is_done or len(taken) < 6:
            assert len(made) <= len(taken) + 2
            taken += await outbox.take()
        producing.result()
    assert taken == list(range(6))


async def test_what_is_made_ahead_is_bounded_by_its_size() -> None:
    outbox: Outbox[bytes] = Outbox(LONG_S, 10, weigh=len)
    outbox.put(b"1234")
    assert not outbox.is_full
    outbox.put(b"5678901234567890")
    assert outbox.is_full
    assert await outbox.take() == [b"1234", b"5678901234567890"]
    assert not outbox.is_full
    outbox.close()


async def test_what_the_producer_left_is_taken_before_its_failure_is_told() -> None:
    outbox: Outbox[int] = Outbox(LONG_S)

    async def produce() -> None:
        outbox.put(1)
        raise ValueError("broken")

    async with Filling(outbox, produce()) as producing:
        assert await outbox.take() == [1]
        assert await outbox.take() == []
        assert outbox.is_done
        with pytest.raises(ValueError, match="broken"):
            producing.result()


async def test_a_producer_ends_with_its_block() -> None:
    outbox: Outbox[int] = Outbox(LONG_S)
    is_cancelled = asyncio.Event()

    async def produce() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async with Filling(outbox, produce()):
        await asyncio.sleep(0)
    assert is_cancelled.is_set()


class Offered:
    """Takes what it is offered, or refuses it."""

    def __init__(self) -> None:
        self.is_taking = True
        self.taken: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> bool:
        if self.is_taking:
            self.taken.append(list(items))
        return self.is_taking


async def waiting(outbox: Outbox[int]) -> "asyncio.Task[list[int]]":
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    return taking


async def test_what_is_ready_together_passes_a_waiting_consumer() -> None:
    offered = Offered()
    outbox: Outbox[int] = Outbox(LONG_S, offer=offered)
    taking = await waiting(outbox)
    outbox.put(1)
    outbox.put(2)
    await asyncio.sleep(0)
    assert offered.taken == [[1, 2]]
    outbox.put(3)
    await asyncio.sleep(0)
    assert offered.taken == [[1, 2], [3]]
    assert not taking.done()
    outbox.put(4, is_last=True)
    assert await taking == [4]
    outbox.close()


async def test_the_last_item_is_taken_by_the_consumer_with_what_is_ready_before_it() -> None:
    offered = Offered()
    outbox: Outbox[int] = Outbox(LONG_S, offer=offered)
    taking = await waiting(outbox)
    outbox.put(1)
    outbox.put(2, is_last=True)
    assert await taking == [1, 2]
    assert offered.taken == []
    outbox.close()


async def test_what_is_refused_wakes_the_consumer() -> None:
    offered = Offered()
    offered.is_taking = False
    outbox: Outbox[int] = Outbox(LONG_S, offer=offered)
    taking = await waiting(outbox)
    outbox.put(1)
    assert await taking == [1]
    outbox.put(2)  # nobody waits: it is taken with the next turn
    offered.is_taking = True
    assert await outbox.take() == [2]
    assert offered.taken == []
    outbox.close()


async def test_what_passes_the_consumer_breaks_the_silence() -> None:
    outbox: Outbox[int] = Outbox(0.3, offer=Offered())
    taking = await waiting(outbox)
    for number in range(4):
        await asyncio.sleep(0.1)  # the time that is measured
        outbox.put(number)
    assert not taking.done()
    assert await taking == []
    outbox.close()


async def test_a_producer_gets_room_when_its_items_pass_the_consumer() -> None:
    offered = Offered()
    outbox: Outbox[int] = Outbox(LONG_S, capacity=2, offer=offered)
    taking = await waiting(outbox)
    outbox.put(1)
    outbox.put(2)
    assert outbox.is_full
    async with asyncio.timeout(LONG_S):
        await outbox.room()
    assert not outbox.is_full
    outbox.finish()
    assert await taking == []
    outbox.close()


async def test_an_offer_that_fails_leaves_the_others_theirs(caplog: pytest.LogCaptureFixture) -> None:
    got: list[int] = []

    def offer(items: Sequence[int]) -> bool:
        got.extend(items)
        return True

    def fail(items: Sequence[int]) -> bool:
        raise ValueError(f"no {items[0]}")

    outboxes = [Outbox[int](LONG_S, offer=fail), Outbox[int](LONG_S, offer=offer)]
    takers = [asyncio.create_task(outbox.take()) for outbox in outboxes]
    await asyncio.sleep(0)
    for outbox in outboxes:
        outbox.put(7)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert got == [7]
    assert "could not be offered" in caplog.text
    outboxes[0].put(8, is_last=True)
    assert await takers[0] == [7, 8]
    takers[1].cancel()
    for outbox in outboxes:
        outbox.close()
