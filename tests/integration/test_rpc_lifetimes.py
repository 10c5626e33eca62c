"""How calls of `Generate` end that do not end by themselves: deadlines, clients that leave or read slowly, drains."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from common.broker.limits import Demand, Verdict
from common.broker.memory_limits import MemoryLimits
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits
from gateway import accepting
from gateway.choice import MAX_READ
from gateway.engine import GenerateEvent, GenerateRequest
from gateway.guidance.grammars import Grammars
from gateway.outbox import CAPACITY_BYTES
from gateway.server import close
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.keyed_gateway import KeyCabinet
from tests.support.polling import until
from tests.support.rpc_gateway import RpcGateway, channel_to, running_rpc_gateway, text_of, trailing_of
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop, Until
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
REQUEST = pb.GenerateRequest(model="tiny", text="hello")
GRACE_S = 20.0
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0),)
"""The client takes 64 KiB ahead and no more."""

LONG = tuple(byte_ids(TOKENIZER, "x" * 1000))
NUM_LONG = 3000
NUM_SCORED = 300


@pytest.fixture
async def gateway() -> AsyncIterator[RpcGateway]:
    async with running_rpc_gateway(ScriptedEngine([tiny_card(TOKENIZER)])) as running:
        yield running


async def baseline(gateway: RpcGateway) -> None:
    """Wait until nothing is held for anybody."""
    await gateway.engine.until_running(0)
    await until(lambda: gateway.service.admission.num_running == 0, "no permit is held")
    assert sample(gateway, "tandem_requests_running") == 0


def sample(gateway: RpcGateway, name: str, **labels: str) -> float:
    return gateway.service.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_deadline_of_the_client_is_the_requests(gateway: RpcGateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Silence()])
    code, trailing = await gateway.refused(REQUEST, timeout=0.4)
    assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
    (request,) = gateway.engine.requests
    assert request.deadline_s is not None
    assert 0 < request.deadline_s <= 0.4
    await baseline(gateway)
    assert sample(gateway, "tandem_request_failures_total", code="deadline_exceeded") == 1
    assert sample(gateway, "tandem_rpc_calls_total", method="Generate", code="DEADLINE_EXCEEDED") == 1


async def test_a_request_without_a_deadline_has_the_servers_own() -> None:
    await _until_the_servers_own_deadline(None)


async def test_a_longer_deadline_than_the_servers_own_counts_for_nothing() -> None:
    await _until_the_servers_own_deadline(3600.0)


async def _until_the_servers_own_deadline(timeout_s: float | None) -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([Silence()])
    async with running_rpc_gateway(engine, deadline_s=0.3) as gateway:
        code, _ = await asyncio.wait_for(gateway.refused(REQUEST, timeout=timeout_s), GRACE_S)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await baseline(gateway)


async def test_a_deadline_that_is_over_at_once_costs_nothing(gateway: RpcGateway) -> None:
    code, _ = await gateway.refused(REQUEST, timeout=0.001)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await baseline(gateway)
    assert gateway.engine.requests == []


class Halted:
    """A stage that begins and never ends."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.was_left = False

    async def __call__(self, *args: Any, **named: Any) -> NoReturn:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_left = True
        raise AssertionError("never")


class HaltedLimits(MemoryLimits):
    """Grants nothing in time."""

    def __init__(self, halted: Halted) -> None:
        super().__init__()
        self.halted = halted

    async def reserve(self, tenant: TenantId, limits: TenantLimits, request: RequestId, demand: Demand) -> Verdict:
        await self.halted()


async def leave(way: str, call: Any, channel: grpc.aio.Channel) -> None:
    if way == "cancels":
        call.cancel()
    else:
        await channel.close()


WAYS = ("cancels", "disconnects")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["tokenising", "compiling"])
async def test_a_client_that_leaves_before_it_waits_holds_nothing(
    gateway: RpcGateway, monkeypatch: pytest.MonkeyPatch, stage: str, way: str
) -> None:
    halted = Halted()
    if stage == "tokenising":
        monkeypatch.setattr(accepting, "encode_prompts", halted)
    else:
        monkeypatch.setattr(Grammars, "compile", halted)
    request = pb.GenerateRequest(model="tiny", text="hello", sampling=pb.Sampling(regex="a+"))
    async with channel_to(gateway.listener) as channel:
        call = GenerationStub(channel).Generate(request)
        await asyncio.wait_for(halted.has_begun.wait(), GRACE_S)
        assert gateway.service.admission.num_running == 1
        await leave(way, call, channel)
        await until(lambda: halted.was_left, "the stage is left")
        await baseline(gateway)
    assert gateway.engine.requests == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_leaves_while_its_limits_are_asked_holds_nothing(tmp_path: Path, way: str) -> None:
    cabinet, halted = KeyCabinet(tmp_path), Halted()
    key = await cabinet.issue("a", TenantLimits(max_concurrent=1))
    entrance = cabinet.entrance(HaltedLimits(halted))
    assert entrance.tenants is not None
    async with running_rpc_gateway(ScriptedEngine([tiny_card(TOKENIZER)]), entrance) as gateway:
        async with channel_to(gateway.listener) as channel:
            call = GenerationStub(channel).Generate(REQUEST, metadata=(("authorization", f"Bearer {key}"),))
            await asyncio.wait_for(halted.has_begun.wait(), GRACE_S)
            await leave(way, call, channel)
            await until(lambda: halted.was_left, "the stage is left")
        await baseline(gateway)
        await entrance.tenants.close()
        assert entrance.tenants.num_held == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shown", ["", "a"])
async def test_a_client_that_leaves_while_nothing_comes_is_noticed(gateway: RpcGateway, shown: str, way: str) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, shown), Silence()])
    async with channel_to(gateway.listener) as channel:
        call = GenerationStub(channel).Generate(REQUEST)
        messages = aiter(call)
        answer = [await anext(messages)]
        if shown:
            answer.append(await anext(messages))
        assert text_of(answer) == shown
        await gateway.engine.until_running(1)
        await leave(way, call, channel)
        await baseline(gateway)
    assert sample(gateway, "tandem_request_success_total", finished_reason="abort") == 1
    assert sample(gateway, "tandem_rpc_calls_total", method="Generate", code="CANCELLED") == 1


async def test_a_client_that_leaves_one_call_keeps_the_others(gateway: RpcGateway) -> None:
    may_end = asyncio.Event()
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Until(may_end), *byte_ids(TOKENIZER, "b"), Stop()])
    kept, left = gateway.stub.Generate(REQUEST), gateway.stub.Generate(REQUEST)
    await gateway.engine.until_running(2)
    left.cancel()
    await gateway.engine.until_running(1)
    may_end.set()
    assert text_of([message async for message in kept]) == "ab"


@dataclass
class CountingEngine(ScriptedEngine):
    """Counts what it has said."""

    num_said: int = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                self.num_said += 1
                yield event


@asynccontextmanager
async def talkative(write_timeout_s: float) -> AsyncIterator[tuple[RpcGateway, CountingEngine]]:
    """A gateway whose engine says 3 MB at once, to the first one who asks."""
    engine = CountingEngine([tiny_card(TOKENIZER, max_context=10**8)])
    engine.play([*[LONG] * NUM_LONG, Stop()], [*byte_ids(TOKENIZER, "ok"), Stop()])
    async with running_rpc_gateway(engine, write_timeout_s=write_timeout_s) as running:
        yield running, engine


SLOW = pb.GenerateRequest(model="tiny", text="hello", sampling=pb.Sampling(max_tokens=10**7, ignore_eos=True))


async def test_a_slow_reader_holds_its_own_call_only_and_gets_everything() -> None:
    async with talkative(write_timeout_s=60) as (gateway, engine):
        async with channel_to(gateway.listener, FIXED_WINDOW) as channel:
            stub = GenerationStub(channel)
            messages = aiter(stub.Generate(SLOW))
            answer = [await anext(messages)]
            await until(lambda: engine.num_said * len(LONG) >= CAPACITY_BYTES, "the engine runs ahead")
            assert text_of([message async for message in stub.Generate(REQUEST)]) == "ok"
            assert engine.num_said < NUM_LONG / 2
            answer += [message async for message in messages]
        assert len(text_of(answer)) == NUM_LONG * len(LONG)
        assert answer[-1].usage.num_generated_tokens == NUM_LONG * len(LONG)


async def test_b107_what_has_waited_for_a_slow_reader_comes_in_messages_that_it_can_read() -> None:
    """As many bytes are made ahead as for a reader of SSE; all in one message they may be more than a client takes."""
    engine, delta = CountingEngine([tiny_card(TOKENIZER, max_context=10**8)]), LONG[:MAX_READ]
    engine.play([*[delta] * NUM_SCORED, Stop()])
    scored = pb.GenerateRequest(model="tiny", text="hello", num_logprobs=20, sampling=pb.Sampling(max_tokens=10**7))
    async with running_rpc_gateway(engine) as gateway, channel_to(gateway.listener, FIXED_WINDOW) as channel:
        messages = aiter(GenerationStub(channel).Generate(scored))
        answer = [await anext(messages)]
        await until(lambda: engine.num_said > 1, "the engine runs ahead")
        answer += [message async for message in messages]
    sizes = [message.ByteSize() for message in answer]
    assert max(sizes) < 2 * CAPACITY_BYTES
    assert sum(sizes) > 4 << 20  # more than gRPC's clients take in one message
    assert sum(len(message.delta.logprobs) for message in answer) == NUM_SCORED * len(delta)


async def test_a_reader_that_takes_nothing_for_too_long_is_dropped() -> None:
    async with talkative(write_timeout_s=0.3) as (gateway, engine):
        async with channel_to(gateway.listener, FIXED_WINDOW) as channel:
            stub = GenerationStub(channel)
            messages = aiter(stub.Generate(SLOW))
            answer = [await anext(messages)]
            await gateway.engine.until_running(1)
            await baseline(gateway)
            assert text_of([message async for message in stub.Generate(REQUEST)]) == "ok"
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await gateway.read_into(answer, messages)
        trailing = trailing_of(failed.value)
        assert (failed.value.code(), trailing["tandem-error-code"]) == (grpc.StatusCode.CANCELLED, "client_too_slow")
        assert engine.num_said < NUM_LONG / 2
        assert sample(gateway, "tandem_request_success_total", finished_reason="abort") == 1


async def test_a_client_that_vanishes_while_it_is_written_to_holds_nothing() -> None:
    async with talkative(write_timeout_s=60) as (gateway, engine):
        async with channel_to(gateway.listener, FIXED_WINDOW) as channel:
            await anext(aiter(GenerationStub(channel).Generate(SLOW)))
            await until(lambda: engine.num_said * len(LONG) >= CAPACITY_BYTES, "the engine runs ahead")
        await baseline(gateway)


async def test_above_the_bound_of_requests_the_others_are_refused_at_once() -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([Silence()])
    async with running_rpc_gateway(engine, max_concurrent_requests=1) as gateway:
        call = gateway.stub.Generate(REQUEST)
        await engine.until_running(1)
        code, trailing = await gateway.refused(REQUEST)
        assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.UNAVAILABLE, "overloaded")
        assert int(trailing["retry-after"]) >= 1
        status, _ = await gateway.http.complete()
        assert status == 503
        call.cancel()
        await baseline(gateway)


@asynccontextmanager
async def draining(gateway: RpcGateway, grace_s: float, delay_s: float = 0.0) -> AsyncIterator["asyncio.Task[bool]"]:
    """Tell the gateway to leave."""
    task = asyncio.create_task(close(gateway.http.runner, grace_s, delay_s, gateway.listener.leave))
    await until(lambda: gateway.service.admission.is_draining, "it drains")
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_drain_lets_calls_end_and_takes_no_new_ones(gateway: RpcGateway) -> None:
    may_end = asyncio.Event()
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Until(may_end), *byte_ids(TOKENIZER, "b"), Stop()])
    messages = aiter(gateway.stub.Generate(REQUEST))
    answer = [await anext(messages), await anext(messages)]
    async with draining(gateway, GRACE_S) as task:
        await until(lambda: _is_refused(gateway.listener.port), "the port is closed")
        code, _ = await gateway.refused(REQUEST)  # also on the connection that is open
        assert code is grpc.StatusCode.UNAVAILABLE
        assert not task.done()
        may_end.set()
        answer += [message async for message in messages]
        assert text_of(answer) == "ab"
        assert await asyncio.wait_for(task, GRACE_S)
    assert len(gateway.engine.requests) == 1


def _is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_at_the_end_of_a_drain_calls_are_told_why(gateway: RpcGateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Silence()])
    answer: list[pb.GenerateResponse] = []
    call = gateway.stub.Generate(REQUEST)
    reading = asyncio.create_task(gateway.read_into(answer, call))
    await until(lambda: text_of(answer) == "a", "it has begun")
    async with draining(gateway, 0.1) as task:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(reading, GRACE_S)
        assert not await asyncio.wait_for(task, GRACE_S)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert trailing_of(failed.value)["tandem-error-code"] == "draining"
    await baseline(gateway)


async def test_until_balancers_have_noticed_calls_are_taken(gateway: RpcGateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    async with draining(gateway, GRACE_S, delay_s=GRACE_S), channel_to(gateway.listener) as channel:
        assert text_of([message async for message in GenerationStub(channel).Generate(REQUEST)]) == "ab"
