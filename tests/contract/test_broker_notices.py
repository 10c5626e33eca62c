"""What every broker promises about the notices that gateways leave each other."""

import asyncio

from common.broker.policy import BrokerPolicy
from common.messages.ids import RequestId
from common.messages.notice import CancelNotice
from tests.support.broker_harness import LONG_S, Harness

A, B = CancelNotice(RequestId("a")), CancelNotice(RequestId("b"), is_done=True)


async def test_every_reader_gets_every_notice_once_and_in_order(harness: Harness) -> None:
    board = harness.notices()
    for _ in range(2):  # readers
        assert await board.read(await board.newest(), 0.0) == []
    begin = await board.newest()
    await board.post(A)
    await board.post(B)
    for _ in range(2):
        posted = await board.read(begin, 0.0)
        assert [each.notice for each in posted] == [A, B]
        assert [each.notice for each in await board.read(posted[0].entry, 0.0)] == [B]
        assert await board.read(posted[1].entry, 0.0) == []


async def test_who_begins_late_reads_nothing_old(harness: Harness) -> None:
    board = harness.notices()
    await board.post(A)
    newest = await board.newest()
    assert await board.read(newest, 0.0) == []
    await board.post(B)
    assert [each.notice for each in await board.read(newest, 0.0)] == [B]


async def test_a_waiting_reader_wakes_with_the_notice(harness: Harness) -> None:
    board = harness.notices()
    reader = asyncio.create_task(board.read(await board.newest(), LONG_S))
    await asyncio.sleep(0)  # let it begin
    await board.post(A)
    assert [each.notice for each in await asyncio.wait_for(reader, LONG_S / 2)] == [A]


async def test_old_notices_go(harness: Harness) -> None:
    board = harness.notices(BrokerPolicy(max_notices=10))
    begin = await board.newest()
    for number in range(500):  # Redis drops whole nodes of 100
        await board.post(CancelNotice(RequestId(str(number))))
    position, kept = begin, []
    while posted := await board.read(position, 0.0):
        kept += [each.notice.request for each in posted]
        position = posted[-1].entry
    assert 10 <= len(kept) <= 200
    assert kept == [str(number) for number in range(500)][-len(kept) :]
