"""A client cancels its request by id over gRPC, at the gateway that has it and through another one."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.broker.memory_notices import MemoryNoticeBoard
from common.messages.chain import EMPTY_CHAIN
from common.messages.job import Job
from common.telemetry.metrics import GatewayMetrics
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.cancel_board import CancelBoard
from gateway.entrance import OPEN_ENTRANCE
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, serve_rpc
from gateway.server import close, port_of, serve
from gateway.service import Service
from gateway.settings import GatewaySettings
from gateway.under_way import UnderWay
from proto import worker_pb2
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.broker_records import FINGERPRINT
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, job_of, quicken
from tests.support.polling import until
from tests.support.rpc_gateway import channel_to, trailing_of
from tests.support.scripted_worker import MODEL, ScriptedWorker
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

HOST = "127.0.0.1"
PATH = "/v1/completions"
LONG = "word " * 1000
"""Too long to be tokenised by the event loop, and short enough for its body to be read there."""

TOKENIZER = byte_level_tokenizer()
CARD = msgspec.structs.replace(tiny_card(TOKENIZER), model=MODEL, fingerprint=FINGERPRINT)


@dataclass
class Gateway:
    """A gateway with one worker: HTTP, and gRPC of its own and of another gateway of the cluster."""

    harness: DispatchHarness
    worker: ScriptedWorker
    http: aiohttp.ClientSession
    service: Service
    own: "GenerationAsyncStub"
    other: "GenerationAsyncStub"

    async def begun(self) -> Job:
        """Return the next request, which has got its first tokens."""
        job = await job_of(self.worker)
        self.worker.accept(job)
        self.worker.send(job, tokens=worker_pb2.Tokens(index=0, ids=byte_ids(TOKENIZER, "hello"), chain=EMPTY_CHAIN))
        return job

    async def until_released(self, job: Job) -> None:
        """The worker was told, and nothing is left here."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self.worker.cancels.get() == (job.request, job.placement)
        await until(lambda: self.harness.dispatcher.num_streams == 0)


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    quicken(monkeypatch)
    harness, notices = DispatchHarness(), MemoryNoticeBoard()
    await harness.broker.registry.publish_card(CARD)
    worker = await harness.add_worker("decode-0")
    under_way = UnderWay(harness.dispatcher.cancel)
    metrics = GatewayMetrics(CollectorRegistry())
    app = create_app(harness.dispatcher, GatewaySettings(), metrics, OPEN_ENTRANCE, under_way)
    runner = await serve(app, HOST, 0)
    async with AsyncExitStack() as stack:
        service = app[SERVICE]
        own = await stack.enter_async_context(_rpc(service, CancelBoard(notices, under_way.cancel)))
        other = await stack.enter_async_context(_rpc(service, CancelBoard(notices, lambda request, tenant: False)))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{HOST}:{port_of(runner)}"))
        yield Gateway(harness, worker, http, service, own, other)
    await close(runner, 0)
    await harness.close()


@asynccontextmanager
async def _rpc(service: Service, board: CancelBoard) -> AsyncIterator["GenerationAsyncStub"]:
    watching = asyncio.create_task(board.watch())
    async with (
        serve_rpc(Generation(service, board.cancel), service, RpcAddress(HOST)) as listener,
        channel_to(listener) as channel,
    ):
        yield GenerationStub(channel)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 20} | fields


@pytest.mark.parametrize("through", ["own", "other"])
async def test_a_stream_ends_with_one_error_event(gateway: Gateway, through: str) -> None:
    stub: GenerationAsyncStub = getattr(gateway, through)
    beginning = asyncio.create_task(gateway.begun())
    async with asyncio.timeout(DEADLINE_S), gateway.http.post(PATH, json=body(stream=True)) as response:
        job = await beginning
        events = [_event(await response.content.readline())]
        assert response.headers["x-request-id"] == job.request
        name = events[0]["id"]
        assert name == f"cmpl-{job.request}"
        assert (await stub.Cancel(pb.CancelRequest(id=name))).is_known
        events += [_event(line) async for line in response.content if line.strip()]
    assert events[0]["choices"][0]["text"] == "hello"
    [error] = [event["error"] for event in events if "error" in event]
    assert (events[-1], error["code"]) == ({"error": error}, "request_cancelled")
    await gateway.until_released(job)
    assert not (await stub.Cancel(pb.CancelRequest(id=name))).is_known


async def test_a_whole_answer_is_499(gateway: Gateway) -> None:
    asking = asyncio.create_task(_ask(gateway.http, body()))
    job = await gateway.begun()
    assert (await gateway.own.Cancel(pb.CancelRequest(id=job.request))).is_known
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (499, "request_cancelled")
    await gateway.until_released(job)


async def test_a_waiting_request_is_withdrawn(gateway: Gateway) -> None:
    await gateway.worker.beat(num_running=gateway.worker.seats)
    asking = asyncio.create_task(_ask(gateway.http, body()))
    await until(lambda: gateway.harness.dispatcher.num_streams == 1)
    [request] = gateway.harness.dispatcher._streams
    assert (await gateway.own.Cancel(pb.CancelRequest(id=request))).is_known
    assert (await asking)[0] == 499
    await gateway.worker.beat()
    assert gateway.worker.jobs.empty()


@contextmanager
def all_tokenizers_busy(service: Service) -> Iterator[None]:
    """Whatever is to be tokenised in a thread waits until the block is left."""
    may_go_on = threading.Event()
    held = [service.executor.submit(may_go_on.wait, DEADLINE_S) for _ in range(service.settings.num_tokenizer_threads)]
    try:
        yield
    finally:
        may_go_on.set()
        assert all(each.result() for each in held)


@pytest.mark.parametrize("through", ["own", "other"])
async def test_a_request_of_http_that_is_being_tokenised_ends_at_once(gateway: Gateway, through: str) -> None:
    stub: GenerationAsyncStub = getattr(gateway, through)
    with all_tokenizers_busy(gateway.service):
        asking = asyncio.create_task(_ask(gateway.http, body(prompt=LONG)))
        await until(lambda: gateway.service.admission.num_running == 1, "it is admitted")
        [request] = gateway.service.under_way._stays
        assert (await stub.Cancel(pb.CancelRequest(id=f"cmpl-{request}"))).is_known
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (499, "request_cancelled")
        assert gateway.service.admission.num_running == 0
        assert not (await stub.Cancel(pb.CancelRequest(id=request))).is_known
    assert gateway.worker.jobs.empty()
    await _still_serves(gateway)


async def test_a_call_that_is_being_tokenised_ends_at_once(gateway: Gateway) -> None:
    with all_tokenizers_busy(gateway.service):
        call = gateway.own.Generate(pb.GenerateRequest(model=MODEL, text=LONG), timeout=DEADLINE_S)
        request = str(dict(await call.initial_metadata())["x-request-id"])
        assert (await gateway.own.Cancel(pb.CancelRequest(id=request))).is_known
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await call.read()
        assert end.value.code() is grpc.StatusCode.CANCELLED
        assert trailing_of(end.value)["tandem-error-code"] == "request_cancelled"
        assert gateway.service.admission.num_running == 0
    assert gateway.worker.jobs.empty()
    await _still_serves(gateway)


async def test_a_client_that_leaves_while_it_is_tokenised_leaves_nothing(gateway: Gateway) -> None:
    with all_tokenizers_busy(gateway.service):
        call = gateway.own.Generate(pb.GenerateRequest(model=MODEL, text=LONG), timeout=DEADLINE_S)
        request = str(dict(await call.initial_metadata())["x-request-id"])
        call.cancel()
        await until(lambda: gateway.service.admission.num_running == 0, "it is gone")
        assert not (await gateway.own.Cancel(pb.CancelRequest(id=request))).is_known


async def _still_serves(gateway: Gateway) -> None:
    asking = asyncio.create_task(_ask(gateway.http, body()))
    job = await gateway.begun()
    num_generated = len(byte_ids(TOKENIZER, "hello"))
    gateway.worker.send(job, finished=worker_pb2.Finished(reason="stop", num_generated=num_generated))
    assert (await asking)[0] == 200


async def test_all_prompts_of_a_request_are_cancelled_together(gateway: Gateway) -> None:
    """The first is complete already: the others are still found by the request's id."""
    asking = asyncio.create_task(_ask(gateway.http, body(prompt=["a", "b", "c"])))
    jobs = {job.request.partition("-")[2]: job for job in [await gateway.begun() for _ in range(3)]}
    assert set(jobs) == {"", "1", "2"}
    num_generated = len(byte_ids(TOKENIZER, "hello"))
    gateway.worker.send(jobs[""], finished=worker_pb2.Finished(reason="stop", num_generated=num_generated))
    await until(lambda: gateway.harness.dispatcher.num_streams == 2)
    assert (await gateway.own.Cancel(pb.CancelRequest(id=jobs[""].request))).is_known
    assert (await asking)[0] == 499
    async with asyncio.timeout(DEADLINE_S):
        told = {await gateway.worker.cancels.get() for _ in range(2)}
    assert told == {(jobs[part].request, jobs[part].placement) for part in ("1", "2")}
    await until(lambda: gateway.harness.dispatcher.num_streams == 0)


async def test_a_clients_own_name_is_no_handle(gateway: Gateway) -> None:
    asking = asyncio.create_task(_ask(gateway.http, body(), {"x-request-id": "mine"}))
    job = await gateway.begun()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await gateway.own.Cancel(pb.CancelRequest(id="mine"))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not asking.done()
    gateway.worker.send(
        job, finished=worker_pb2.Finished(reason="length", num_generated=len(byte_ids(TOKENIZER, "hello")))
    )
    assert (await asking)[0] == 200


async def _ask(
    http: aiohttp.ClientSession, asked: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    async with asyncio.timeout(DEADLINE_S), http.post(PATH, json=asked, headers=headers) as response:
        return response.status, await response.json()


def _event(line: bytes) -> Any:
    return json.loads(line.removeprefix(b"data: "))
