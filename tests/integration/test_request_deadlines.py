"""A request whose time is over ends with one error, wherever it is, and its worker hears of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import DeadlineExceeded
from common.messages.ids import RequestId
from common.messages.sampling import SamplingParams
from gateway.engine import GenerateRequest
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.scripted_worker import MODEL

TIME_S = 0.3


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    quicken(monkeypatch)
    gateway = DispatchHarness()
    yield gateway
    await gateway.close()


def brief(time_s: float = TIME_S) -> GenerateRequest:
    return GenerateRequest(RequestId("r"), MODEL, [5, 6, 7], SamplingParams(seed=1, max_tokens=8), deadline_s=time_s)


async def test_a_worker_that_is_too_slow_is_told(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(brief()))
    job = await job_of(worker)
    assert job.time_left_s is not None
    assert 0 < job.time_left_s <= TIME_S
    answer(worker, job, [9], finish=None)
    with pytest.raises(DeadlineExceeded):
        await running
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.cancels.get() == ("r", 1)


async def test_a_request_that_nobody_accepts_ends_in_time(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(brief()))
    await job_of(worker)
    with pytest.raises(DeadlineExceeded):
        await running
    assert gateway.dispatcher.num_streams == 0


async def test_time_that_was_over_before_is_no_work_for_anybody(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    with pytest.raises(DeadlineExceeded):
        await gateway.collect(brief(0.0))
    assert worker.jobs.empty()


async def test_an_answer_in_time_is_an_answer(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(brief(60.0)))
    answer(worker, await job_of(worker), [9, 10])
    assert ids_of(await running) == [9, 10]
