"""The dispatcher with requests of several choices, over real feeds and scripted workers."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import GrammarViolated, InvalidRequest
from common.messages.chain import chain_of
from common.messages.codec import unpack_ids
from common.messages.ids import ChoiceIndex, RequestId, TenantId
from common.messages.job import Job
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, TokenDelta
from proto import worker_pb2 as pb
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, job_of, quicken
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, ScriptedWorker

FIRST, SECOND, THIRD = ChoiceIndex(0), ChoiceIndex(1), ChoiceIndex(2)
REQUEST = RequestId("r")


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def make_request(num_choices: int = 2, *, num_prompt_tokens: int = 3, max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    prompt = list(range(5, 5 + num_prompt_tokens))
    return GenerateRequest(
        REQUEST, MODEL, prompt, sampling, num_choices=num_choices, tenant=TenantId("acme"), priority=3
    )


def tell(worker: ScriptedWorker, job: Job, choice: ChoiceIndex, ids: list[int]) -> None:
    """Send the next tokens of a choice, behind those that were shown before this placement."""
    shown = next(unpack_ids(each.shown) for each in job.choices if each.choice == choice)
    worker.send(job, tokens=pb.Tokens(index=len(shown), ids=ids, chain=chain_of(shown), choice=choice))


def finish(worker: ScriptedWorker, job: Job, choice: ChoiceIndex, num_generated: int) -> None:
    """End a choice."""
    worker.send(job, finished=pb.Finished(reason="length", num_generated=num_generated, choice=choice))


async def cancel_of(worker: ScriptedWorker) -> tuple[str, int]:
    """Return the next cancel of a placement that the worker gets."""
    async with asyncio.timeout(DEADLINE_S):
        return await worker.cancels.get()


async def choice_cancel_of(worker: ScriptedWorker) -> tuple[str, int, int]:
    """Return the next cancel of a choice that the worker gets."""
    async with asyncio.timeout(DEADLINE_S):
        return await worker.choice_cancels.get()


async def test_one_job_has_all_choices(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request(3)))
    job = await job_of(worker)
    assert [each.choice for each in job.choices] == [FIRST, SECOND, THIRD]
    assert (job.tenant, job.priority) == ("acme", 3)
    worker.accept(job)
    for choice in (FIRST, SECOND, THIRD):
        tell(worker, job, choice, [10 + choice])
        finish(worker, job, choice, 1)
    events = await running
    ends = [event for event in events if isinstance(event, EndOfChoice)]
    assert sorted(ends, key=lambda end: end.choice) == [
        EndOfChoice(FinishReason.LENGTH, 1, choice=choice) for choice in (FIRST, SECOND, THIRD)
    ]
    assert {event.choice: event.token_ids for event in events if isinstance(event, TokenDelta)} == {
        FIRST: (10,),
        SECOND: (11,),
        THIRD: (12,),
    }
    assert gateway.dispatcher.num_streams == 0
    assert worker.cancels.empty()


async def test_the_next_placement_has_only_the_choices_that_go_on(gateway: DispatchHarness) -> None:
    first = await gateway.add_worker("decode-0", 1)
    running = asyncio.create_task(gateway.collect(make_request(3)))
    job = await job_of(first)
    first.accept(job)
    tell(first, job, FIRST, [10])
    tell(first, job, SECOND, [11, 21])
    finish(first, job, FIRST, 1)
    await until(
        lambda: gateway.dispatcher._streams[REQUEST].choices.nums_shown == [2, 0], "what it has told", DEADLINE_S
    )
    second = await gateway.add_worker("decode-1", 2)
    await first.stop()
    again = await job_of(second)
    assert [(each.choice, unpack_ids(each.shown)) for each in again.choices] == [(SECOND, [11, 21]), (THIRD, [])]
    second.accept(again)
    tell(second, again, THIRD, [12])
    tell(second, again, SECOND, [31])
    finish(second, again, THIRD, 1)
    finish(second, again, SECOND, 3)
    events = await running
    told: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, TokenDelta):
            told.setdefault(event.choice, []).extend(event.token_ids)
    assert told == {FIRST: [10], SECOND: [11, 21, 31], THIRD: [12]}
    assert [type(event) for event in events].count(EndOfChoice) == 3


async def test_a_choice_that_nobody_needs_is_cancelled_alone(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    events = gateway.dispatcher.generate(make_request())
    reading = asyncio.ensure_future(anext(events))
    job = await job_of(worker)
    worker.accept(job)
    tell(worker, job, FIRST, [10])
    assert await reading == TokenDelta(0, (10,))
    gateway.dispatcher.end_choice(REQUEST, FIRST)
    gateway.dispatcher.end_choice(REQUEST, FIRST)
    assert await choice_cancel_of(worker) == (REQUEST, job.placement, FIRST)
    tell(worker, job, SECOND, [11])
    finish(worker, job, SECOND, 1)
    assert [event async for event in events] == [
        TokenDelta(0, (11,), choice=SECOND),
        EndOfChoice(FinishReason.LENGTH, 1, choice=SECOND),
    ]
    assert worker.cancels.empty()
    assert worker.choice_cancels.empty()


async def test_with_the_last_needed_choice_the_placement_is_cancelled(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    worker.accept(job)
    tell(worker, job, SECOND, [11])
    finish(worker, job, SECOND, 1)
    await until(lambda: gateway.dispatcher._streams[REQUEST].choices.nums_shown == [0], "an end", DEADLINE_S)
    gateway.dispatcher.end_choice(REQUEST, FIRST)
    assert await running == [TokenDelta(0, (11,), choice=SECOND), EndOfChoice(FinishReason.LENGTH, 1, choice=SECOND)]
    assert await cancel_of(worker) == (REQUEST, job.placement)
    assert worker.cancels.empty()


async def test_a_choice_given_up_before_acceptance_is_cancelled_with_it(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    gateway.dispatcher.end_choice(REQUEST, SECOND)
    worker.accept(job)
    assert await choice_cancel_of(worker) == (REQUEST, job.placement, SECOND)
    tell(worker, job, SECOND, [11])
    tell(worker, job, FIRST, [10])
    finish(worker, job, FIRST, 1)
    assert await running == [TokenDelta(0, (10,)), EndOfChoice(FinishReason.LENGTH, 1)]


async def test_a_choice_given_up_in_between_is_in_no_later_placement(gateway: DispatchHarness) -> None:
    first = await gateway.add_worker("decode-0", 1)
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(first)
    first.accept(job)
    tell(first, job, FIRST, [10])
    await until(lambda: gateway.shown("r"), "a token", DEADLINE_S)
    gateway.dispatcher.end_choice(REQUEST, SECOND)
    second = await gateway.add_worker("decode-1", 2)
    await first.stop()
    again = await job_of(second)
    assert [each.choice for each in again.choices] == [FIRST]
    second.accept(again)
    finish(second, again, FIRST, 1)
    assert await running == [TokenDelta(0, (10,)), EndOfChoice(FinishReason.LENGTH, 1)]


async def test_an_unknown_request_has_no_choice_to_end(gateway: DispatchHarness) -> None:
    gateway.dispatcher.end_choice(REQUEST, FIRST)
    assert gateway.dispatcher.num_streams == 0


async def test_a_client_that_leaves_releases_all_choices(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    events = gateway.dispatcher.generate(make_request())
    reading = asyncio.ensure_future(anext(events))
    job = await job_of(worker)
    worker.accept(job)
    tell(worker, job, FIRST, [10])
    await reading
    await events.aclose()
    assert await cancel_of(worker) == (REQUEST, job.placement)
    assert worker.cancels.empty()


async def test_what_only_lacks_its_ends_is_not_placed_again(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request(max_tokens=1)))
    job = await job_of(worker)
    worker.accept(job)
    tell(worker, job, FIRST, [10])
    tell(worker, job, SECOND, [11])
    await worker.stop()
    assert await running == [
        TokenDelta(0, (10,)),
        TokenDelta(0, (11,), choice=SECOND),
        EndOfChoice(FinishReason.LENGTH, 1),
        EndOfChoice(FinishReason.LENGTH, 1, choice=SECOND),
    ]


async def test_more_choices_than_any_worker_holds_are_refused(gateway: DispatchHarness) -> None:
    await gateway.add_worker("decode-0", num_blocks=6, seats=8)
    with pytest.raises(InvalidRequest, match=r"7 answers to a prompt of 10 tokens need 112 tokens .* 96 tokens"):
        await gateway.collect(make_request(7, num_prompt_tokens=10))


async def test_an_answer_that_leaves_its_grammar_fails(gateway: DispatchHarness) -> None:
    worker = await gateway.add_worker("decode-0")
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    worker.accept(job)
    worker.send(job, failed=pb.Failed(message="no token fits", code="grammar_violated"))
    with pytest.raises(GrammarViolated, match="no token fits"):
        await running
