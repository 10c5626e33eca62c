"""Clients that vanish, stall or overstay: whatever they held is released at once."""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from common.lifecycle.signals import StopSignals
from gateway.api.keys import SERVICE
from gateway.process import close_gently
from gateway.server import close
from tests.support.gateway_server import Gateway, chat_body, parse_events, raw_request, running_gateway
from tests.support.polling import until
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop, Until
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, max_context=100_000)])) as running:
        yield running


def hang_up(writer: asyncio.StreamWriter, way: str) -> None:
    """Close the connection by FIN, or by RST (linger 0)."""
    if way == "RST":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort() if way == "RST" else writer.close()


async def assert_all_released(gateway: Gateway) -> None:
    await gateway.engine.until_running(0)
    await until(lambda: gateway.runner.app[SERVICE].admission.num_running == 0, "every permit is back")


@pytest.mark.parametrize("way", ["FIN", "RST"])
@pytest.mark.parametrize("streams", [True, False])
async def test_b015_before_the_first_token(gateway: Gateway, way: str, streams: bool) -> None:
    gateway.engine.play([Silence()])
    async with gateway.connection() as (_, writer):
        writer.write(raw_request(CHAT, chat_body(stream=streams, max_tokens=4000)))
        await gateway.engine.until_running(1)
        hang_up(writer, way)
        await assert_all_released(gateway)


@pytest.mark.parametrize("way", ["FIN", "RST"])
@pytest.mark.parametrize("streams", [True, False])
async def test_b015_who_leaves_while_nothing_flows_is_noticed_within_50_ms(
    gateway: Gateway, way: str, streams: bool
) -> None:
    """The quickest of ten: on a busy machine others may have the processor for longer than that."""
    gateway.engine.play([Silence()])
    times_s = []
    for _ in range(10):
        async with gateway.connection() as (_, writer):
            writer.write(raw_request(CHAT, chat_body(stream=streams, max_tokens=4000)))
            await gateway.engine.until_running(1)
            left_s = time.perf_counter()
            hang_up(writer, way)
            await gateway.engine.until_running(0)
            times_s.append(time.perf_counter() - left_s)
    assert min(times_s) < 0.05, times_s


@pytest.mark.parametrize("way", ["FIN", "RST"])
async def test_b015_after_the_third_chunk_in_silence(gateway: Gateway, way: str) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "abc"), Silence()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True, max_tokens=4000)))
        await reader.readuntil(b'"c"')
        hang_up(writer, way)
        await assert_all_released(gateway)


@pytest.mark.parametrize("way", ["FIN", "RST"])
async def test_b015_while_tokens_flow(gateway: Gateway, way: str) -> None:
    letter = byte_ids(TOKENIZER, "a")[0]
    go_on = asyncio.Event()
    gateway.engine.play([letter, letter, letter, Until(go_on), *[letter] * 4000, Silence()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True, max_tokens=5000)))
        await reader.readuntil(b'"a"')
        hang_up(writer, way)
        go_on.set()
        await assert_all_released(gateway)


async def test_b015_the_abort_is_counted(gateway: Gateway) -> None:
    gateway.engine.play([Silence()])
    async with gateway.connection() as (_, writer):
        writer.write(raw_request(CHAT, chat_body()))
        await gateway.engine.until_running(1)
        hang_up(writer, "RST")
        await assert_all_released(gateway)
    assert 'finished_reason="abort"} 1.0' in (await gateway.get("/metrics"))[1]


async def test_b015_the_connection_of_a_whole_answer_is_used_again(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with gateway.connection() as (reader, writer):
        for _ in range(2):
            writer.write(raw_request(CHAT, chat_body()))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-Length"))
            assert b'"hi"' in await reader.readexactly(length)


async def test_b107_a_client_that_stops_reading_is_dropped() -> None:
    letter = byte_ids(TOKENIZER, "a")[0]
    engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=1_000_000)])
    engine.play([letter] * 100_000)
    async with running_gateway(engine, write_timeout_s=0.2) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", gateway.port))
            await asyncio.get_running_loop().sock_sendall(client, raw_request(CHAT, chat_body(stream=True)))
            await gateway.engine.until_running(1)
            await gateway.engine.until_running(0)
        assert 'finished_reason="abort"} 1.0' in (await gateway.get("/metrics"))[1]


async def test_b107_a_slow_reader_gets_everything(gateway: Gateway) -> None:
    text = "abcdefgh" * 1000
    gateway.engine.play([*byte_ids(TOKENIZER, text), Stop()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True)).replace(b"Host: x", b"Host: x\r\nConnection: close"))
        await gateway.engine.until_running(1)
        received = await reader.read()
    assert received.count(b'"content":') == len(text) + 1
    assert b"[DONE]" in received


@pytest.mark.parametrize("size", [1, 100], ids=["short events", "long events"])
async def test_b107_who_reads_slowly_and_steadily_is_not_dropped(size: int) -> None:
    """What fills the buffers takes such a client longer than a client may take nothing."""
    piece, num_pieces = tuple(byte_ids(TOKENIZER, "x" * size)), 400_000 // (300 + size * 60)
    engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=10**7)])
    engine.play([*[piece] * num_pieces, Stop()])
    loop, received = asyncio.get_running_loop(), bytearray()
    async with running_gateway(engine, write_timeout_s=1.0) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            body = chat_body(stream=True, logprobs=True)
            await loop.sock_sendall(
                client, raw_request(CHAT, body).replace(b"Host: x", b"Host: x\r\nConnection: close")
            )
            while part := await loop.sock_recv(client, 1024):
                received += part
                await asyncio.sleep(0.015)  # it is slow
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b"x" * size + b'"},') == num_pieces


async def test_b107_a_reader_that_is_behind_the_end_gets_everything() -> None:
    """The whole answer is ready while its first part still waits for the client."""
    first, last = tuple(byte_ids(TOKENIZER, "x" * 8000)), tuple(byte_ids(TOKENIZER, "y" * 9))
    engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=10**7)])
    is_behind = asyncio.Event()
    engine.play([first, Until(is_behind), last, Stop()])
    async with running_gateway(engine) as gateway, gateway.connection() as (reader, writer):
        body = chat_body(stream=True, logprobs=True, top_logprobs=20)  # 2 KB per token: far more than sockets hold
        writer.write(raw_request(CHAT, body).replace(b"Host: x", b"Host: x\r\nConnection: close"))
        await engine.until_running(1)
        is_behind.set()
        await engine.until_running(0)  # nobody reads so far
        received = await reader.read()
    assert b"x" * len(first) in received
    assert b"y" * len(last) in received
    assert b"[DONE]" in received


async def test_b109_running_streams_end_and_readiness_is_gone_at_once(gateway: Gateway) -> None:
    may_end = asyncio.Event()
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Until(may_end), *byte_ids(TOKENIZER, "b"), Stop()])
    async with gateway.connection() as (reader, writer):
        assert (await gateway.get("/health/ready"))[0] == 200
        writer.write(raw_request(CHAT, chat_body(stream=True)))
        await reader.readuntil(b'"a"')
        closing = asyncio.create_task(close(gateway.runner, 5))
        await asyncio.sleep(0)
        assert (await gateway.get("/health/ready"))[0] == 503  # on the connection that has asked before
        may_end.set()
        assert b'"b"' in await reader.readuntil(b"[DONE]")
        assert await closing


async def test_b109_a_second_signal_ends_streams_by_an_error_event(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Silence()])
    signals = StopSignals()
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await reader.readuntil(b'"a"')
        closing = asyncio.create_task(close_gently(gateway.runner, 60, signals))
        await until(lambda: gateway.runner.app[SERVICE].admission.is_draining, "it drains")
        signals.hurry.set()
        rest = await reader.read()
        await closing
    events = parse_events(rest[rest.index(b"data: ") :])
    assert events[-1]["error"]["code"] == "draining"


async def test_no_descriptor_is_left_behind(gateway: Gateway) -> None:
    gateway.engine.play([Silence()])

    async def vanish() -> None:
        async with gateway.connection() as (_, writer):
            writer.write(raw_request(CHAT, chat_body(stream=True)))
            await gateway.engine.until_running(1)
            hang_up(writer, "RST")
            await gateway.engine.until_running(0)

    await vanish()
    before = num_descriptors()
    for _ in range(5):
        await vanish()
    assert num_descriptors() <= before


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
