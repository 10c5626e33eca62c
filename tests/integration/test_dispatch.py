"""The dispatcher over real feeds and scripted workers: placement, acceptance, failover, cancels, long prompts."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import GenerationFailed, InvalidLogits, InvalidRequest, Overloaded, WorkerLost
from common.messages.chain import chain_of
from common.messages.codec import pack_ids, unpack_ids
from common.messages.ids import PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, TokenDelta
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, MAX_FAILURES, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.polling import until
from tests.support.scripted_worker import MODEL


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def make_request(prompt: list[int] | None = None, *, max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, stop_ids=(2,))
    return GenerateRequest(RequestId("r"), MODEL, prompt or [5, 6, 7], sampling)


async def test_a_request_is_placed_and_streamed(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    assert job.prompt is not None
    assert unpack_ids(job.prompt) == [5, 6, 7]
    answer(worker, job, [9, 10])
    assert await running == [TokenDelta(0, (9, 10)), EndOfChoice(FinishReason.LENGTH, 2)]
    assert gateway.dispatcher.num_streams == 0
    assert worker.cancels.empty()


async def test_without_a_worker_it_is_refused_at_once(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    await worker.stop()
    await until(lambda: not gateway.roster.decode_workers(MODEL))
    with pytest.raises(Overloaded) as refusal:
        await gateway.collect(make_request())
    assert refusal.value.retry_after_s > 0


async def test_a_long_prompt_travels_directly(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0", num_blocks=200)
    prompt = list(range(2000))
    running = asyncio.create_task(gateway.collect(make_request(prompt)))
    job = await job_of(worker)
    assert job.prompt is None
    assert job.num_prompt_tokens == 2000
    worker.accept(job)
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.prompts.get() == pack_ids(prompt)
    answer(worker, job, [9])
    assert ids_of(await running) == [9]


async def test_b057_a_prompt_beyond_every_pool_is_refused_with_both_numbers(gateway: DispatchHarness) -> None:
    await gateway.add_worker("decode-0", num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"64 tokens.*|.*100 tokens.*64") as refusal:
        await gateway.collect(make_request(list(range(100))))
    assert "100" in refusal.value.message


async def test_a_lost_worker_is_replaced_and_the_stream_continues(gateway: DispatchHarness) -> None:
    first = await gateway.add_worker("decode-0", 1)
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(first)
    answer(first, job, [9, 10], finish=None)
    second = await gateway.add_worker("decode-1", 2)
    await first.stop()
    again = await job_of(second)
    assert (again.placement, unpack_ids(again.choices[0].shown)) == (2, [9, 10])
    answer(second, again, [11])
    events = await running
    assert ids_of(events) == [9, 10, 11]
    assert events[-1] == EndOfChoice(FinishReason.LENGTH, 3)


async def test_an_unaccepted_job_is_placed_again(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    lost = await job_of(worker)
    await worker.beat()  # absorbed, but never confirmed
    again = await job_of(worker)
    assert (lost.placement, again.placement) == (1, 2)
    answer(worker, again, [9])
    assert ids_of(await running) == [9]


async def test_a_diverging_worker_is_cancelled_and_shown_tokens_win(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    worker.send(job, tokens=pb.Tokens(index=1, ids=[10], chain=chain_of([8])))
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.cancels.get() == ("r", 1)
    again = await job_of(worker)
    assert unpack_ids(again.choices[0].shown) == [9]
    answer(worker, again, [11])
    assert ids_of(await running) == [9, 11]


async def test_the_failure_budget_ends_in_one_error(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    for placement in range(1, MAX_FAILURES + 1):
        job = await job_of(worker)
        assert job.placement == placement
        worker.accept(job)
        worker.send(job, failed=pb.Failed(message="no pages", code="preempted", is_retryable=True))
        await worker.beat()
    with pytest.raises(WorkerLost, match=f"{MAX_FAILURES} times"):
        await running
    assert worker.jobs.empty()


@pytest.mark.parametrize(
    ("code", "error"),
    [("invalid_logits", InvalidLogits), ("too_long", InvalidRequest), ("internal", GenerationFailed)],
)
async def test_a_final_failure_is_not_retried(gateway: DispatchHarness, code: str, error: type[Exception]) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    worker.accept(job)
    worker.send(job, failed=pb.Failed(message="no", code=code))
    with pytest.raises(error):
        await running
    assert worker.jobs.empty()


async def test_closing_the_generator_cancels_at_the_worker(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    events = gateway.dispatcher.generate(make_request())
    first = asyncio.ensure_future(anext(events))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    assert await first == TokenDelta(0, (9,))
    await events.aclose()
    async with asyncio.timeout(DEADLINE_S):
        assert await worker.cancels.get() == ("r", 1)


async def test_a_cancelled_waiting_request_leaves_the_queue(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0", seats=1)
    await worker.beat(num_running=1)
    running = asyncio.create_task(gateway.collect(make_request()))

    async def is_at(where: str) -> bool:
        return await gateway.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(1)) == where

    await until(lambda: is_at("waiting"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: is_at("unknown"))
    await worker.beat(num_running=0)
    assert worker.jobs.empty()


async def test_a_late_acceptance_of_an_old_placement_is_cancelled(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    lost = await job_of(worker)
    await worker.beat()
    again = await job_of(worker)
    worker.accept(lost)
    async with asyncio.timeout(DEADLINE_S):
        while await worker.cancels.get() != ("r", 1):
            pass
    answer(worker, again, [9])
    assert ids_of(await running) == [9]


async def test_only_the_terminal_event_was_lost(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request(max_tokens=2)))
    job = await job_of(worker)
    answer(worker, job, [9, 10], finish=None)
    await worker.stop()
    assert await running == [TokenDelta(0, (9, 10)), EndOfChoice(FinishReason.LENGTH, 2)]
