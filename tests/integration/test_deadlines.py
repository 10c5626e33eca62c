"""Deadlines of requests: wherever a request is when its time is over, its client is told and all is released."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import DeadlineExceeded
from common.messages.ids import PlacementNumber, RequestId
from common.messages.job import Job
from common.messages.sampling import SamplingParams
from gateway.api.keys import SERVICE
from gateway.deadline import HEADER
from gateway.engine import GenerateRequest
from gateway.tokenizer import ModelTokenizer
from proto import worker_pb2 as pb
from tests.support.dispatch_gateway import DispatchGateway, dispatch_gateway
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, job_of, quicken
from tests.support.gateway_server import chat_body, raw_request, running_gateway
from tests.support.polling import until
from tests.support.scripted_engine import ScriptedEngine, Silence
from tests.support.scripted_worker import MODEL, ScriptedWorker
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
SHORT = {HEADER: "300"}
LONG_S = 60.0


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DispatchHarness]:
    """A gateway's dispatcher with quick timers."""
    quicken(monkeypatch)
    running = DispatchHarness()
    yield running
    await running.close()


def make_request(deadline_s: float | None) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=8)
    return GenerateRequest(RequestId("r"), MODEL, [5, 6, 7], sampling, deadline_s=deadline_s)


async def is_released(harness: DispatchHarness, job: Job) -> bool:
    where = await harness.broker.jobs.whereabouts(job.request, job.placement)
    return where == "unknown" and harness.dispatcher.num_streams == 0


class TestEngine:
    """Whoever calls the dispatcher, by HTTP or not."""

    async def test_while_it_waits_for_room(self, harness: DispatchHarness) -> None:
        worker = await harness.add_worker("decode-0", seats=0)
        with pytest.raises(DeadlineExceeded):
            await harness.collect(make_request(0.2))

        async def is_gone() -> bool:
            return await harness.broker.jobs.whereabouts(RequestId("r"), PlacementNumber(1)) == "unknown"

        await until(is_gone, "the waiting job's end", DEADLINE_S)
        assert harness.dispatcher.num_streams == 0
        assert worker.jobs.empty()

    @pytest.mark.parametrize("ids", [[], [9]], ids=["prefilling", "decoding"])
    async def test_while_a_worker_has_it(self, harness: DispatchHarness, ids: list[int]) -> None:
        worker = await harness.add_worker("decode-0")
        running = asyncio.create_task(harness.collect(make_request(0.4)))
        job = await job_of(worker)
        worker.accept(job)
        if ids:
            answer(worker, job, ids, finish=None)
        with pytest.raises(DeadlineExceeded):
            await running
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == ("r", 1)

    async def test_a_complete_answer_is_one(self, harness: DispatchHarness) -> None:
        worker = await harness.add_worker("decode-0")
        running = asyncio.create_task(harness.collect(make_request(LONG_S)))
        answer(worker, await job_of(worker), [9])
        await running

    async def test_none_is_left(self, harness: DispatchHarness) -> None:
        worker = await harness.add_worker("decode-0")
        with pytest.raises(DeadlineExceeded):
            await harness.collect(make_request(-0.5))
        await harness.dispatcher.close()
        assert worker.jobs.empty()
        assert worker.cancels.empty()

    async def test_every_placement_says_what_is_left(self, harness: DispatchHarness) -> None:
        """A failover goes on with the request's deadline; it gets no fresh one."""
        first = await harness.add_worker("decode-0", 1)
        begin_s = time.monotonic()
        running = asyncio.create_task(harness.collect(make_request(LONG_S)))
        jobs = [await job_of(first)]
        answer(first, jobs[0], [9], finish=None)
        second = await harness.add_worker("decode-1", 2)
        await until(lambda: time.monotonic() - begin_s > 0.3)
        between_s = time.monotonic() - begin_s
        await first.stop()
        jobs.append(await job_of(second))
        left_s = [job.time_left_s or 0.0 for job in jobs]
        assert LONG_S - DEADLINE_S < left_s[0] <= LONG_S
        assert left_s[1] <= LONG_S - between_s
        answer(second, jobs[1], [10])
        await running

    async def test_without_one_nothing_is_said(self, harness: DispatchHarness) -> None:
        worker = await harness.add_worker("decode-0")
        running = asyncio.create_task(harness.collect(make_request(None)))
        job = await job_of(worker)
        assert job.time_left_s is None
        answer(worker, job, [9])
        await running

    async def test_a_worker_that_ends_it_first_says_the_same(self, harness: DispatchHarness) -> None:
        worker = await harness.add_worker("decode-0")
        running = asyncio.create_task(harness.collect(make_request(LONG_S)))
        job = await job_of(worker)
        worker.accept(job)
        worker.send(job, failed=pb.Failed(message="its time is over", code="deadline_exceeded"))
        with pytest.raises(DeadlineExceeded, match="its time is over"):
            await running


@pytest.fixture
async def worker(harness: DispatchHarness) -> ScriptedWorker:
    """The only worker, with one seat."""
    return await harness.add_worker("decode-0", seats=1)


@pytest.fixture
async def gateway(harness: DispatchHarness, worker: ScriptedWorker) -> AsyncIterator[DispatchGateway]:
    """The gateway before it."""
    async with dispatch_gateway(harness) as running:
        yield running


@pytest.mark.parametrize("streams", [True, False])
class TestHttp:
    """What a client sees, streaming or not."""

    async def test_queued(
        self, harness: DispatchHarness, worker: ScriptedWorker, gateway: DispatchGateway, streams: bool
    ) -> None:
        await worker.beat(num_running=1)
        status, body = await gateway.chat(SHORT, streams=streams)
        assert_deadline(status, body, is_begun=False)
        await until(lambda: harness.dispatcher.num_streams == 0)
        await worker.beat()
        assert worker.jobs.empty()

    @pytest.mark.parametrize("ids", [[], byte_ids(TOKENIZER, "abc")], ids=["prefilling", "decoding"])
    async def test_running(
        self,
        harness: DispatchHarness,
        worker: ScriptedWorker,
        gateway: DispatchGateway,
        streams: bool,
        ids: list[int],
    ) -> None:
        asking = asyncio.create_task(gateway.chat({HEADER: "1000"}, streams=streams))
        job = await job_of(worker)
        worker.accept(job)
        if ids:
            answer(worker, job, ids, finish=None)
        status, body = await asking
        assert_deadline(status, body, is_begun=streams and bool(ids))
        async with asyncio.timeout(DEADLINE_S):
            assert await worker.cancels.get() == (job.request, 1)
        assert harness.dispatcher.num_streams == 0

    async def test_the_default(self, harness: DispatchHarness, worker: ScriptedWorker, streams: bool) -> None:
        async with dispatch_gateway(harness, deadline_s=0.3) as gateway:
            asking = asyncio.create_task(gateway.chat({}, streams=streams))
            job = await job_of(worker)
            assert 0.0 < (job.time_left_s or 0.0) <= 0.3
            assert_deadline(*await asking, is_begun=False)

    async def test_the_header_overrules_the_default(
        self, harness: DispatchHarness, worker: ScriptedWorker, streams: bool
    ) -> None:
        async with dispatch_gateway(harness, deadline_s=0.001) as gateway:
            asking = asyncio.create_task(gateway.chat({HEADER: "60000"}, streams=streams))
            answer(worker, await job_of(worker), byte_ids(TOKENIZER, "abc"))
            assert (await asking)[0] == 200

    async def test_a_bad_header_is_named(self, gateway: DispatchGateway, worker: ScriptedWorker, streams: bool) -> None:
        status, body = await gateway.chat({HEADER: "soon"}, streams=streams)
        assert (status, body["error"]["param"]) == (400, HEADER)
        assert worker.jobs.empty()


def assert_deadline(status: int, body: dict[str, dict[str, str]], *, is_begun: bool) -> None:
    """The client was told: by a status, or by the last event of a stream that had begun."""
    assert body["error"]["code"] == "deadline_exceeded"
    assert status == (200 if is_begun else 504)


async def test_tokenising_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def encode_chat(tokenizer: ModelTokenizer, text: str) -> list[int]:
        assert may_end.wait(DEADLINE_S)
        return [1]

    monkeypatch.setattr(ModelTokenizer, "encode_chat", encode_chat)
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER)])) as gateway:
        try:
            status, body = await gateway.post(CHAT, chat_body(), headers=SHORT)
        finally:
            may_end.set()
        assert_deadline(status, body, is_begun=False)
        assert gateway.engine.requests == []
        assert gateway.runner.app[SERVICE].admission.num_running == 0


async def test_what_was_spent_before_is_not_the_engine_s() -> None:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER)])) as gateway:
        assert (await gateway.post(CHAT, chat_body(), headers={HEADER: "60000"}))[0] == 200
        [request] = gateway.engine.requests
        assert request.deadline_s is not None
        assert 0.0 < request.deadline_s < 60.0


async def test_a_slow_reader_has_no_more_time() -> None:
    """Its buffers are full, so nobody waits for the engine any more."""
    letter = byte_ids(TOKENIZER, "a")[0]
    engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=1_000_000)])
    engine.play([*[letter] * 100_000, Silence()])
    async with running_gateway(engine, write_timeout_s=60.0) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            body = chat_body(stream=True, max_tokens=200_000)
            await loop.sock_sendall(client, raw_request(CHAT, body, f"{HEADER}: 700"))
            await engine.until_running(1)
            await engine.until_running(0)
            admission = gateway.runner.app[SERVICE].admission
            await until(lambda: admission.num_running == 0, "the permit", DEADLINE_S)
