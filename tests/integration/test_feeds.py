"""How a gateway judges its workers by their feeds, and what it tells those that work on something outdated."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from common.messages.chain import chain_of
from common.messages.codec import unpack_ids
from common.messages.ids import PlacementNumber, RequestId
from common.messages.job import Job
from common.messages.sampling import SamplingParams
from gateway import feeds as feeds_module
from gateway.engine import GenerateEvent, GenerateRequest
from proto import worker_pb2 as pb
from tests.support.byte_link import ByteLink
from tests.support.dispatch_harness import (
    DEADLINE_S,
    DispatchHarness,
    answer,
    ids_of,
    job_of,
    quicken,
    quicken_silence,
)
from tests.support.polling import turns, until
from tests.support.scripted_worker import MODEL, ScriptedWorker


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway that loses patience soon."""
    quicken(monkeypatch)
    quicken_silence(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def make_request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(RequestId(name), MODEL, [5, 6, 7], SamplingParams(seed=1, max_tokens=8))


async def start(gateway: DispatchHarness, worker: ScriptedWorker) -> tuple[asyncio.Task[list[GenerateEvent]], Job]:
    """Return a request that runs on that worker, which has sent one token."""
    running = asyncio.create_task(gateway.collect(make_request()))
    job = await job_of(worker)
    answer(worker, job, [9], finish=None)
    await until(lambda: gateway.shown("r") == [9], "the first token", DEADLINE_S)
    return running, job


async def go_on(gateway: DispatchHarness, other: ScriptedWorker, running: asyncio.Task[list[GenerateEvent]]) -> None:
    """Let the request end on that worker."""
    again = await job_of(other)
    assert unpack_ids(again.choices[0].shown) == [9]
    answer(other, again, [10])
    assert ids_of(await running) == [9, 10]


class TestSilence:
    async def test_a_frozen_worker_s_requests_move(self, gateway: DispatchHarness) -> None:
        link = ByteLink()
        frozen = await gateway.add_worker("decode-0", 1, link=link)
        running, _ = await start(gateway, frozen)
        other = await gateway.add_worker("decode-1", 2)
        link.hold()
        await go_on(gateway, other, running)
        assert gateway.count("failovers", reason="lost") == 1

    async def test_our_own_pause_loses_nobody(self, gateway: DispatchHarness) -> None:
        """As with SIGSTOP: nothing of ours runs, and frames wait in the socket."""
        worker = await gateway.add_worker("decode-0", 1)
        running, job = await start(gateway, worker)
        for number in range(1, 4):
            time.sleep(2 * feeds_module.SILENCE_S)  # noqa: ASYNC251 - the pause
            before = [9, 10, 11][:number]
            worker.send(job, tokens=pb.Tokens(index=number, ids=[9 + number], chain=chain_of(before)))
            await until(lambda: gateway.shown("r") == [9, 10, 11, 12][: number + 1], "a token", DEADLINE_S)  # noqa: B023
            assert gateway.is_connected(worker)
        worker.send(job, finished=pb.Finished(reason="length", num_generated=4))
        assert ids_of(await running) == [9, 10, 11, 12]
        assert gateway.count("placements", kind="again") == 0

    async def test_a_worker_that_died_in_our_pause_is_lost_without_blame(self, gateway: DispatchHarness) -> None:
        """Its connection may have broken because we did not answer."""
        dying = await gateway.add_worker("decode-0", 1)
        running, _ = await start(gateway, dying)
        other = await gateway.add_worker("decode-1", 2)
        stream = gateway.dispatcher._streams[RequestId("r")]
        stopping = asyncio.create_task(dying.stop())
        await turns(1)
        time.sleep(2 * feeds_module.SILENCE_S)  # noqa: ASYNC251 - the pause
        await stopping
        await go_on(gateway, other, running)
        assert stream.budget.num_failures == 0

    async def test_a_dropped_channel_loses_its_worker(self, gateway: DispatchHarness) -> None:
        """gRPC cancels the calls of a channel that a new incarnation at the same address has replaced; that must not
        end the feed without a word."""
        old = await gateway.add_worker("decode-0", 1)
        running, _ = await start(gateway, old)
        other = await gateway.add_worker("decode-1", 2)
        gateway.channels.drop(old.record.address)
        await go_on(gateway, other, running)
        await until(lambda: gateway.is_connected(old), "its feed", DEADLINE_S)


class TestStall:
    async def test_a_stalled_worker_s_requests_move(self, gateway: DispatchHarness) -> None:
        stalled = await gateway.add_worker("decode-0", 1)
        running, _ = await start(gateway, stalled)
        other = await gateway.add_worker("decode-1", 2)
        stalled.feeds.tell_stalled(True)
        await go_on(gateway, other, running)
        assert gateway.count("failovers", reason="stalled") == 1
        assert await asyncio.wait_for(stalled.cancels.get(), DEADLINE_S) == ("r", 1)

    async def test_it_is_met_again_when_it_goes_on(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        worker.feeds.tell_stalled(True)
        await until(lambda: not gateway.is_connected(worker), "the stall", DEADLINE_S)
        assert not gateway.roster.decode_workers(MODEL)
        worker.feeds.tell_stalled(False)
        await until(lambda: gateway.is_connected(worker), "progress", DEADLINE_S)
        running, job = await start(gateway, worker)
        worker.send(job, finished=pb.Finished(reason="length", num_generated=1))
        assert ids_of(await running) == [9]

    async def test_tokens_in_the_frame_that_tells_it_are_taken(self, gateway: DispatchHarness) -> None:
        stalled = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(stalled)
        other = await gateway.add_worker("decode-1", 2)
        answer(stalled, job, [9], finish=None)
        stalled.feeds.tell_stalled(True)
        await go_on(gateway, other, running)

    async def test_what_it_accepts_meanwhile_moves_too(self, gateway: DispatchHarness) -> None:
        """Its event loop goes on: it may have read the job before anybody knew, and nothing else would tell of it."""
        stalled = await gateway.add_worker("decode-0", 1)
        running = asyncio.create_task(gateway.collect(make_request()))
        job = await job_of(stalled)
        other = await gateway.add_worker("decode-1", 2)
        stream = gateway.dispatcher._streams[RequestId("r")]
        stream.target = None  # the answer of Redis is still on its way when the stall is told
        stalled.feeds.tell_stalled(True)
        await until(lambda: not gateway.is_connected(stalled), "the stall", DEADLINE_S)
        stalled.accept(job)
        answer(other, await job_of(other), [9])
        assert ids_of(await running) == [9]


class TestStaleAnswers:
    async def test_a_worker_that_thaws_is_told_at_once(self, gateway: DispatchHarness) -> None:
        """It could not hear the cancel; without another it would decode to the end for nobody."""
        link = ByteLink()
        frozen = await gateway.add_worker("decode-0", 1, link=link)
        running, job = await start(gateway, frozen)
        other = await gateway.add_worker("decode-1", 2)
        link.hold()
        await go_on(gateway, other, running)
        assert frozen.cancels.empty()
        await until(lambda: not is_telling(gateway), "the end of the first attempt", DEADLINE_S)
        frozen.send(job, tokens=pb.Tokens(index=1, ids=[10], chain=chain_of([9])))
        link.heal()
        async with asyncio.timeout(DEADLINE_S):
            assert await frozen.cancels.get() == ("r", 1)

    async def test_also_one_that_has_nothing_to_say(self, gateway: DispatchHarness) -> None:
        """Its request waits for a prefill, say."""
        link = ByteLink()
        frozen = await gateway.add_worker("decode-0", 1, link=link)
        running, _ = await start(gateway, frozen)
        other = await gateway.add_worker("decode-1", 2)
        link.hold()
        await go_on(gateway, other, running)
        await until(lambda: not is_telling(gateway), "the end of the first attempt", DEADLINE_S)
        forget_calls(frozen)
        link.heal()
        async with asyncio.timeout(DEADLINE_S):
            assert await frozen.cancels.get() == ("r", 1)

    async def test_every_outdated_event_is_counted_and_answered_once(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        for index in range(3):
            worker.send(outdated("unknown"), tokens=pb.Tokens(index=index, ids=[7], chain=1))
        worker.send(outdated("unknown"), finished=pb.Finished(reason="stop", num_generated=3))
        worker.send(outdated("another"), accepted=pb.Accepted())
        await until(lambda: gateway.count("stale_messages") == 5, "stale messages", DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert {await worker.cancels.get() for _ in range(2)} == {("unknown", 1), ("another", 1)}
        await until(lambda: not is_telling(gateway), "the replies", DEADLINE_S)
        worker.send(outdated("unknown"), tokens=pb.Tokens(index=3, ids=[7], chain=1))
        worker.send(outdated("mark"), accepted=pb.Accepted())
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("mark", 1)
        await gateway.dispatcher.close()
        assert worker.cancels.empty()

    async def test_an_older_placement_of_a_running_request(self, gateway: DispatchHarness) -> None:
        worker = await gateway.add_worker("decode-0", 1)
        other = await gateway.add_worker("decode-1", 2)
        running, job = await start(gateway, worker)
        worker.send(job, failed=pb.Failed(message="no pages", code="preempted", is_retryable=True))
        again = await next_job(worker, other)
        late = other if again[0] is worker else worker
        late.send(job, tokens=pb.Tokens(index=1, ids=[8], chain=chain_of([9])))
        async with asyncio.timeout(DEADLINE_S):
            assert await late.cancels.get() == ("r", 1)
        answer(again[0], again[1], [10])
        assert ids_of(await running) == [9, 10]

    async def test_one_that_has_left_the_registry(self, gateway: DispatchHarness) -> None:
        """It drains: it takes nothing new, but works on what it has, and must hear when that is over."""
        worker = await gateway.add_worker("decode-0", 1)
        running, job = await start(gateway, worker)
        await gateway.broker.registry.leave(worker.worker, worker.epoch)
        await until(lambda: not gateway.roster.serving_workers(MODEL), "the roster to know", DEADLINE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == (job.request, 1)

    async def test_late_early_copies_are_ignored(self, gateway: DispatchHarness) -> None:
        prefill = await gateway.add_worker("prefill-0", 3)
        prefill.send(outdated("unknown"), tokens=pb.Tokens(index=0, ids=[7], chain=1, is_early=True))
        prefill.send(outdated("mark"), accepted=pb.Accepted())
        async with asyncio.timeout(DEADLINE_S):
            assert await prefill.cancels.get() == ("mark", 1)
        await gateway.dispatcher.close()
        assert prefill.cancels.empty()
        assert gateway.count("stale_messages") == 1


def outdated(request: str) -> Job:
    """Return a job that this gateway has never sent."""
    sampling = SamplingParams(seed=1, max_tokens=8)
    return Job(RequestId(request), PlacementNumber(1), DispatchHarness.gateway, MODEL, 3, sampling)


def is_telling(gateway: DispatchHarness) -> bool:
    """Whether a cancel is under way."""
    return bool(gateway.dispatcher._canceller._sending)


def forget_calls(worker: ScriptedWorker) -> None:
    """Drop what was sent to a frozen worker: it resumes, and its kernel has reset the connections."""
    assert worker.link is not None
    worker.link.cut()


async def next_job(*workers: ScriptedWorker) -> tuple[ScriptedWorker, Job]:
    """Return the job that one of them is given."""
    await until(lambda: any(not worker.jobs.empty() for worker in workers), "a job", DEADLINE_S)
    worker = next(worker for worker in workers if not worker.jobs.empty())
    return worker, worker.jobs.get_nowait()
