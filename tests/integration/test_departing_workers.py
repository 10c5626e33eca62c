"""A worker leaves while a request is assigned to it and has not been answered: another one answers it, once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.messages.ids import RequestId
from common.messages.registry import WorkerHealth
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, TokenDelta
from proto import worker_pb2 as pb
from tests.support.byte_link import ByteLink
from tests.support.dispatch_harness import (
    DispatchHarness,
    answer,
    job_of,
    quicken,
    quicken_silence,
)
from tests.support.scripted_worker import MODEL, ScriptedWorker

REQUEST = GenerateRequest(RequestId("r"), MODEL, [5, 6, 7], SamplingParams(seed=1, max_tokens=8))


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    quicken(monkeypatch)
    quicken_silence(monkeypatch)
    gateway = DispatchHarness()
    yield gateway
    await gateway.close()


async def leave(worker: ScriptedWorker, way: str) -> None:
    """Go away, or become useless, in one of the ways that were seen."""
    match way:
        case "killed":
            await worker.stop(leaves=False)
        case "left":
            await worker.stop()
        case "frozen":
            assert worker.link is not None
            worker.link.hold()
        case _:
            raise AssertionError(way)


@pytest.mark.parametrize("is_accepted", [False, True], ids=["unaccepted", "accepted"])
@pytest.mark.parametrize("way", ["killed", "left", "frozen"])
async def test_b050_an_assigned_request_is_answered_by_another_worker(
    gateway: DispatchHarness, way: str, is_accepted: bool
) -> None:
    leaver = await gateway.add_worker("decode-0", link=ByteLink())
    running = asyncio.create_task(gateway.collect(REQUEST))
    job = await job_of(leaver)
    if is_accepted:
        leaver.accept(job)
    other = await gateway.add_worker("decode-1")
    await leave(leaver, way)
    again = await job_of(other)
    assert again.placement > job.placement
    answer(other, again, [9, 10])
    assert await running == [TokenDelta(0, (9, 10)), EndOfChoice(FinishReason.LENGTH, 2)]


async def test_b050_a_draining_worker_gives_an_assigned_request_back(gateway: DispatchHarness) -> None:
    leaver = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(REQUEST))
    job = await job_of(leaver)
    leaver.accept(job)
    other = await gateway.add_worker("decode-1")
    await leaver.beat(health=WorkerHealth.DRAINING)
    leaver.send(job, failed=pb.Failed(message="it leaves", code="worker_draining", is_retryable=True))
    answer(other, await job_of(other), [9, 10])
    assert await running == [TokenDelta(0, (9, 10)), EndOfChoice(FinishReason.LENGTH, 2)]
