"""Cancels by id over several gateways that share a notice board."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.broker.memory_notices import MemoryNoticeBoard
from common.errors import BrokerUnavailable
from common.messages.ids import ANYBODY, EntryId, RequestId, TenantId
from common.messages.notice import CancelNotice
from gateway import cancel_board as module
from gateway.cancel_board import CancelBoard
from tests.support.polling import until

R = RequestId("r")


class ShakyBoard(MemoryNoticeBoard):
    """A board that can be away; `num_readers` counts reads under way."""

    is_away = False
    num_readers = 0

    async def post(self, notice: CancelNotice) -> None:
        if self.is_away:
            raise BrokerUnavailable("Redis is away")
        await super().post(notice)

    async def newest(self) -> EntryId:
        if self.is_away:
            raise BrokerUnavailable("Redis is away")
        self.num_readers += 1
        return await super().newest()


class Gateway:
    """A gateway's board and its requests."""

    def __init__(self, notices: ShakyBoard) -> None:
        self.under_way: set[RequestId] = set()
        self.tenant = ANYBODY
        self.board = CancelBoard(notices, self.cancel_here)

    def cancel_here(self, request: RequestId, tenant: TenantId) -> bool:
        is_known = request in self.under_way and tenant == self.tenant
        if is_known:
            self.under_way.remove(request)
        return is_known


@pytest.fixture
def notices() -> ShakyBoard:
    return ShakyBoard()


@pytest.fixture
async def gateways(notices: ShakyBoard, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Gateway]]:
    """Three gateways that read."""
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    made = [Gateway(notices) for _ in range(3)]
    watching = [asyncio.create_task(gateway.board.watch()) for gateway in made]
    await until(lambda: notices.num_readers == 3)
    yield made
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_its_own_request_needs_no_redis(gateways: list[Gateway], notices: ShakyBoard) -> None:
    notices.is_away = True
    gateways[0].under_way.add(R)
    assert await gateways[0].board.cancel(R)
    assert gateways[0].under_way == set()


async def test_a_request_of_another_gateway_is_ended_there(
    gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 20.0)  # an answer ends the wait, not this
    gateways[2].under_way.update({R, RequestId("other")})
    assert await gateways[0].board.cancel(R)
    assert gateways[2].under_way == {"other"}


async def test_one_answer_is_for_all_who_asked(gateways: list[Gateway]) -> None:
    gateways[2].under_way.add(R)
    asked = [gateway.board.cancel(R) for gateway in (gateways[0], gateways[0], gateways[1])]
    assert await asyncio.gather(*asked) == [True, True, True]


async def test_b139_a_request_of_another_tenant_is_not_known(gateways: list[Gateway]) -> None:
    gateways[2].under_way.add(R)
    gateways[2].tenant = TenantId("key-a")
    assert not await gateways[0].board.cancel(R)
    assert not await gateways[0].board.cancel(R, TenantId("key-b"))
    assert await gateways[0].board.cancel(R, TenantId("key-a"))


async def test_nobody_knows_it(gateways: list[Gateway]) -> None:
    assert not await gateways[0].board.cancel(R)
    assert not await gateways[0].board.cancel(R)


async def test_others_cannot_be_asked_without_redis(gateways: list[Gateway], notices: ShakyBoard) -> None:
    notices.is_away = True
    with pytest.raises(BrokerUnavailable):
        await gateways[0].board.cancel(R)


async def test_a_gateway_that_began_without_redis_reads_later(notices: ShakyBoard) -> None:
    notices.is_away = True
    late, asking = Gateway(notices), Gateway(notices)
    late.under_way.add(R)
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(gateway.board.watch()) for gateway in (late, asking)]
        await asyncio.sleep(0)
        notices.is_away = False
        await until(lambda: notices.num_readers == 2)
        assert await asking.board.cancel(R)
        for task in watching:
            task.cancel()
