"""Malformed, oversized and unkind traffic at the gRPC listener is refused by a status; everybody else is served."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest

from gateway.rpc import listener
from gateway.rpc.calls import OWN_METHODS
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.polling import until
from tests.support.rpc_gateway import HOST, RpcGateway, channel_to, running_rpc_gateway, text_of, trailing_of
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
REQUEST = pb.GenerateRequest(model="tiny", text="hello")
MAX_BYTES = 1 << 20
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
async def gateway() -> AsyncIterator[RpcGateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "ok"), Stop()])
    async with running_rpc_gateway(engine, max_body_bytes=MAX_BYTES) as running:
        yield running
        assert text_of(await running.generate(REQUEST)) == "ok"
        assert running.service.admission.num_running == 0


async def raw(channel: grpc.aio.Channel, path: str, message: bytes, **call: Any) -> grpc.aio.AioRpcError:
    """Return how a call of plain bytes fails."""
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await method(message, **call)
    return failed.value


@pytest.mark.parametrize("path", [*OWN_METHODS, HEALTH])
async def test_messages_that_are_none_are_refused(
    gateway: RpcGateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(path)
    no_utf8 = b"\x0a\x02\xc3\x28" if "ListModels" not in path else b"\xc3\x28"  # which has no field
    for message in (b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", no_utf8, chance.randbytes(1000)):
        error = await raw(gateway.channel, path, message)
        assert (error.code(), trailing_of(error)["details"]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "The message cannot be read.",
        )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_any_bytes_get_a_status_that_is_the_clients_fault(gateway: RpcGateway) -> None:
    chance, template = random.Random(7), REQUEST.SerializeToString()
    codes = set()
    for _ in range(300):
        message = bytearray(template + chance.randbytes(chance.randrange(12)))
        message[chance.randrange(len(message))] = chance.randrange(256)
        codes.add(await outcome(gateway.channel, bytes(message)))
    # INTERNAL: the scripted engine answers one choice, however many are asked for.
    assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL generation_failed"}
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= codes


async def outcome(channel: grpc.aio.Channel, message: bytes) -> str:
    """Return the status of a request of plain bytes, with the code of a failure of ours."""
    generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/tandem.v1.Generation/Generate")
    try:
        async for _ in generate(message):
            pass
    except grpc.aio.AioRpcError as error:
        code = error.code()
        return f"{code.name} {trailing_of(error)['tandem-error-code']}" if code in OURS else code.name
    return "OK"


async def test_reflection_answers_nonsense(gateway: RpcGateway) -> None:
    tell: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = gateway.channel.stream_stream(REFLECTION)
    call = tell()
    await call.write(b"\xff\xff\xff")
    assert isinstance(await call.read(), bytes)
    call.cancel()


async def test_a_message_above_the_limit_is_refused(gateway: RpcGateway) -> None:
    too_long = pb.GenerateRequest(model="tiny", text="x" * MAX_BYTES)
    code, _ = await gateway.refused(too_long)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("num_bytes", [10, 256 << 20])
async def test_b141_compressed_messages_are_refused_unopened(num_bytes: int) -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "ok"), Stop()])
    async with running_rpc_gateway(engine, max_body_bytes=MAX_BYTES) as gateway:
        bomb = pb.GenerateRequest(model="tiny", text="x" * num_bytes).SerializeToString()
        process = psutil.Process()
        before = process.memory_info().rss
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            error = await raw(
                gateway.channel, "/tandem.v1.Generation/Generate", bomb, compression=algorithm, timeout=30
            )
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert process.memory_info().rss - before < 64 << 20
        assert text_of(await gateway.generate(REQUEST)) == "ok"


@pytest.mark.parametrize("path", ["/tandem.v1.Generation/Nothing", "/x/y", "/", "/tandem.v1.Generation/"])
async def test_other_methods_are_not_implemented(gateway: RpcGateway, path: str) -> None:
    assert (await raw(gateway.channel, path, b"")).code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
        random.Random(1).randbytes(4096),
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_other_protocols_are_hung_up_on(gateway: RpcGateway, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(HOST, gateway.listener.port)
    try:
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-request-id", "x" * 4000),),
        (("x-request-id", "a"), ("x-request-id", "b")),
        (("x-request-id-bin", b"\x00\xff"),),
        (("traceparent", "nonsense"),),
        (("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),),
        (("tracestate", ","), ("tracestate", "=" * 500)),
        (("authorization", "Bearer whatever"),),
        (("tandem-error-code", "x"), ("retry-after", "1")),
    ],
)
async def test_odd_metadata_changes_nothing(gateway: RpcGateway, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert text_of(await gateway.generate(REQUEST, metadata=metadata)) == "ok"


async def test_too_much_metadata_is_refused(gateway: RpcGateway) -> None:
    code, _ = await gateway.refused(REQUEST, metadata=(("x-much", "x" * 100_000),))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_above_all_bounds_are_refused_and_their_places_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_OTHER_CALLS", 1)
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([Silence()])
    async with running_rpc_gateway(engine, max_concurrent_requests=2) as gateway:
        calls = [gateway.stub.Generate(REQUEST) for _ in range(2)]
        await engine.until_running(2)
        code, _ = await gateway.refused(REQUEST)
        assert code is grpc.StatusCode.UNAVAILABLE  # the third is looked at
        calls.append(gateway.stub.Generate(REQUEST))
        for call in calls:
            call.cancel()
        await engine.until_running(0)
        engine.play([*byte_ids(TOKENIZER, "ok"), Stop()])
        await until(lambda: gateway.service.admission.num_running == 0, "no permit is held")
        assert text_of(await gateway.generate(REQUEST)) == "ok"


async def test_calls_that_are_cancelled_as_fast_as_they_are_made_hold_nothing(gateway: RpcGateway) -> None:
    gateway.engine.play([Silence()])
    async with channel_to(gateway.listener) as channel:
        stub = GenerationStub(channel)
        for number in range(300):
            call = stub.Generate(REQUEST)
            if number % 3:
                await asyncio.sleep(0)
            call.cancel()
    await gateway.engine.until_running(0)
    await until(lambda: gateway.service.admission.num_running == 0, "no permit is held")
    gateway.engine.play([*byte_ids(TOKENIZER, "ok"), Stop()])
