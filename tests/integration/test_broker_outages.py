"""Loops of workers that read from Redis go on when it comes back, and what had been assigned before is not cut."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from common.errors import BrokerUnavailable
from tests.support.broker_records import FINGERPRINT
from tests.support.feed_client import make_job
from tests.support.polling import until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, running_fabric

PROMPT = list(range(30))
NUM_FAILURES = 5


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


class Outage:
    """Lets the next calls of a reader fail, as a connection that drops does."""

    def __init__(self, read: Callable[..., Awaitable[Any]]) -> None:
        self._read = read
        self.num_left = 0

    async def __call__(self, *arguments: Any) -> Any:
        if self.num_left:
            self.num_left -= 1
            raise BrokerUnavailable("Redis is unavailable: the connection was closed")
        return await self._read(*arguments)


async def test_b117_readers_of_workers_outlast_dropped_connections(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = fabric.broker.tasks(FINGERPRINT)
    jobs, claims = Outage(fabric.broker.jobs.read), Outage(tasks.claim)
    monkeypatch.setattr(fabric.broker.jobs, "read", jobs)
    monkeypatch.setattr(tasks, "claim", claims)
    decode, prefill, client = await fabric.pair()
    decode.valve.close()
    await client.place(make_job("running", PROMPT, max_tokens=9), decode.record)
    await until(lambda: decode.valve.is_holding, "one is assigned before")
    jobs.num_left = claims.num_left = NUM_FAILURES
    decode.valve.open()
    assert (await client.answer("running")).tokens == answer(PROMPT, 9)
    await client.place(make_job("next", [7, *PROMPT]), decode.record)
    assert (await client.answer("next")).tokens == answer([7, *PROMPT], 5)
    await until(lambda: not jobs.num_left and not claims.num_left, "both readers have failed and gone on")
    await client.place(make_job("last", [8, *PROMPT]), decode.record)
    assert (await client.answer("last")).tokens == answer([8, *PROMPT], 5)
    assert not decode.task.done()
    assert not prefill.task.done()
    await fabric.until_idle()
