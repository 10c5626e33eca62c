"""A gateway that is told to leave: nothing is refused, cut or reset that its time allows to serve."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from common.errors import InvalidSetting
from common.telemetry.metrics import GatewayMetrics
from gateway import connections
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.connections import LINGER_S
from gateway.entrance import OPEN_ENTRANCE
from gateway.listeners import descriptors_of_systemd, inherit
from gateway.server import accept_from, answer_at, close, port_of, set_up
from gateway.settings import GatewaySettings
from tests.support.gateway_server import Gateway, chat_body, parse_events, raw_request, running_gateway
from tests.support.polling import until
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop, Until
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
GRACE_S = 20.0
"""Far above what any drain here needs: one that uses it up fails by its duration."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER)])) as running:
        yield running


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket as a supervisor holds it."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held


@asynccontextmanager
async def draining(gateway: Gateway, grace_s: float = GRACE_S) -> AsyncIterator["asyncio.Task[bool]"]:
    """Tell the gateway to leave; it has begun to when the block is entered, and has left when it is over."""
    task = asyncio.create_task(close(gateway.runner, grace_s))
    await until(lambda: gateway.runner.app[SERVICE].admission.is_draining, "it drains")
    try:
        yield task
    finally:
        await asyncio.wait_for(task, GRACE_S)


async def answer_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body of an answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head, await reader.readexactly(int(length.partition(b":")[2]))


async def test_a_request_on_an_open_connection_is_served_and_told_to_be_the_last(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body()))
        head, _ = await answer_of(reader)
        assert b"connection: close" not in head.lower()
        async with draining(gateway) as task:
            writer.write(raw_request(CHAT, chat_body()))
            head, body = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head.lower()
            assert json.loads(body)["choices"][0]["message"]["content"] == "ab"
            assert await reader.read() == b""
        assert task.result()


async def test_a_leaving_gateway_is_not_ready(gateway: Gateway) -> None:
    async with gateway.connection() as (reader, writer), draining(gateway):
        writer.write(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        head, body = await answer_of(reader)
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["reason"] == "draining"


async def test_an_idle_connection_is_closed_and_does_not_hold_the_drain(gateway: Gateway) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with gateway.connection() as (reader, writer), draining(gateway) as task:
        assert await reader.read() == b""
        writer.close()
    assert task.result()
    assert loop.time() - began_s < LINGER_S + GRACE_S / 2


async def test_a_connection_with_unread_bytes_is_not_closed(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a pause of this process: a client has sent its request, which nobody has read yet."""
    monkeypatch.setattr(connections, "LINGER_S", 0.0)
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    server = gateway.runner.server
    async with gateway.connection() as (reader, writer), gateway.connection() as (idle, _):
        own_port = writer.get_extra_info("sockname")[1]
        await until(lambda: len(server.connections) == 2, "both are accepted")
        (transport,) = (
            each.transport for each in server.connections if each.transport.get_extra_info("peername")[1] == own_port
        )
        transport.pause_reading()
        writer.write(raw_request(CHAT, chat_body()))
        await writer.drain()
        async with draining(gateway) as task:
            assert await idle.read() == b""  # the drain has looked at both
            transport.resume_reading()
            head, _ = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200")
        assert task.result()


async def test_without_connections_nothing_is_waited_for(gateway: Gateway) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await close(gateway.runner, GRACE_S)
    assert loop.time() - began_s < LINGER_S


async def test_a_body_that_is_still_arriving_arrives(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    request = raw_request(CHAT, chat_body())
    async with gateway.connection() as (reader, writer):
        writer.write(request[:-20])
        await until(lambda: gateway.runner.server.requests_count == 1, "the head has arrived")
        async with draining(gateway) as task:
            writer.write(request[-20:])
            head, _ = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200")
        assert task.result()


async def test_behind_a_stream_that_promised_more_another_request_is_served(gateway: Gateway) -> None:
    may_end = asyncio.Event()
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Until(may_end), *byte_ids(TOKENIZER, "b"), Stop()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True)))
        await reader.readuntil(b'"a"')
        async with draining(gateway) as task:
            may_end.set()
            await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
            writer.write(raw_request(CHAT, chat_body()))
            head, _ = await answer_of(reader)
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head.lower()
        assert task.result()


async def test_at_the_limit_streams_end_by_an_error_event_and_nothing_new_is_served(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Silence()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await reader.readuntil(b'"a"')
        async with draining(gateway, grace_s=0.05) as task:
            rest = await reader.read()
        assert not task.result()
    events = parse_events(rest[rest.index(b"data: ") :] if b"data: " in rest else rest)
    assert events[-1]["error"]["code"] == "draining"
    await gateway.engine.until_running(0)


@asynccontextmanager
async def gateway_on(listener: socket.socket) -> AsyncIterator[tuple[web.AppRunner, ScriptedEngine]]:
    """A gateway that has inherited the listener of its supervisor."""
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    app = create_app(engine, GatewaySettings(), GatewayMetrics(CollectorRegistry()), OPEN_ENTRANCE)
    runner = await set_up(app)
    await accept_from(runner, inherit([os.dup(listener.fileno())]))
    try:
        yield runner, engine
    finally:
        await close(runner, 0)


async def test_a_connection_that_finds_no_gateway_waits_for_the_next_one(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    async with gateway_on(listener) as (runner, _):
        assert await close(runner, GRACE_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(CHAT, chat_body()))
    async with gateway_on(listener) as (_, engine):
        engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
        async with asyncio.timeout(GRACE_S):
            head, _ = await answer_of(reader)
    assert head.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_this_very_process_answers_at_its_own_socket(listener: socket.socket, tmp_path: Path) -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    app = create_app(engine, GatewaySettings(), GatewayMetrics(CollectorRegistry()), OPEN_ENTRANCE)
    own = tmp_path / "gateway.sock"
    runner = await set_up(app)
    await answer_at(runner, own)
    await accept_from(runner, inherit([os.dup(listener.fileno())]))
    assert port_of(runner) == listener.getsockname()[1]
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(own))) as session,
        session.get("http://gateway/health/ready") as response,
    ):
        assert response.status == 200
    await close(runner, 0)


async def test_a_gateway_without_supervisor_accepts_until_balancers_have_noticed(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    task = asyncio.create_task(close(gateway.runner, GRACE_S, delay_s=GRACE_S))
    await until(lambda: gateway.runner.app[SERVICE].admission.is_draining, "it drains")
    async with aiohttp.ClientSession() as newcomer:
        async with newcomer.get(f"{gateway.url}/health/ready") as response:
            assert response.status == 503
        async with newcomer.post(gateway.url + CHAT, json=chat_body()) as response:
            assert response.status == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_what_does_not_listen_is_refused_by_name(tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(InvalidSetting, match="listen_fds"):
        inherit([file])
    os.close(file)
    with socket.socket() as quiet, pytest.raises(InvalidSetting, match="no TCP socket that listens"):
        inherit([os.dup(quiet.fileno())])
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "clients.sock"))
        local.listen()
        with pytest.raises(InvalidSetting, match="listen_fds"):  # it has no port that could be told
            inherit([os.dup(local.fileno())])


def test_socket_activation_is_for_the_process_that_it_names() -> None:
    assert descriptors_of_systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}) == (3, 4)
    assert descriptors_of_systemd({"LISTEN_PID": "1", "LISTEN_FDS": "2"}) == ()
    assert descriptors_of_systemd({}) == ()
