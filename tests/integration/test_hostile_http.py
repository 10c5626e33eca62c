"""Requests that attack the server's parser, memory or logs."""

import asyncio
import gzip
import json
import re
import resource
import zlib
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_server import Gateway, chat_body, raw_request, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
MIB = 1 << 20


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with running_gateway(engine, max_body_bytes=MIB) as running:
        yield running
        assert (await running.chat())[0] == 200  # still served


async def status_of(gateway: Gateway, request: bytes) -> int:
    """Return the status of the answer to raw bytes."""
    async with gateway.connection() as (reader, writer):
        writer.write(request)
        line = await reader.readline()
    return int(line.split()[1])


# B140


@pytest.mark.parametrize("sent", ["abc-1.2_Z", "x" * 128])
async def test_b140_a_harmless_request_id_is_echoed(gateway: Gateway, sent: str) -> None:
    async with gateway.session.post(gateway.url + CHAT, json=chat_body(), headers={"X-Request-Id": sent}) as response:
        assert response.headers["x-request-id"] == sent
        assert sent not in await response.text()


@pytest.mark.parametrize("sent", ["x" * 129, "a b", "id: x", "é", "a;b", '"', "a/b"])
@pytest.mark.parametrize("streams", [True, False])
async def test_b140_any_other_is_replaced(gateway: Gateway, sent: str, streams: bool) -> None:
    request = raw_request(CHAT, chat_body(stream=streams), f"X-Request-Id: {sent}", "Connection: close")
    async with gateway.connection() as (reader, writer):
        writer.write(request)
        answer = await reader.read()
    echoed = re.findall(rb"(?i)^x-request-id: (.*)\r$", answer, re.MULTILINE)
    assert len(echoed) == 1
    assert re.fullmatch(rb"[0-9a-f]{32}", echoed[0])
    assert sent.encode() not in answer.replace(b'"', b"") or sent == '"'


async def test_b140_errors_are_named_too(gateway: Gateway) -> None:
    async with gateway.session.get(gateway.url + "/nope", headers={"X-Request-Id": "abc"}) as response:
        assert response.headers["x-request-id"] == "abc"


@pytest.mark.parametrize(
    "header",
    [
        "X-Request-Id: " + "x" * MIB,
        "traceparent: " + "0" * MIB,
        "\r\n".join(f"X-{number}: 1" for number in range(10_000)),
        "X-Request-Id: a\x00b",
        "Transfer-Encoding: chunked",
        "Content-Length: 5",
    ],
    ids=["long id", "long traceparent", "many headers", "NUL", "TE and CL", "two lengths"],
)
async def test_b140_headers_that_are_refused(gateway: Gateway, header: str, caplog: pytest.LogCaptureFixture) -> None:
    assert await status_of(gateway, raw_request(CHAT, chat_body(), header)) in {400, 431}
    assert gateway.engine.requests == []
    assert caplog.records == []


async def test_b140_a_long_request_line(gateway: Gateway) -> None:
    assert await status_of(gateway, b"GET /" + b"x" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n") in {400, 414, 431}


async def test_b140_a_model_name_with_newlines_reaches_no_log_line(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await gateway.chat(model="a\r\nforged: line\ndata: [DONE]")
    assert status == 404
    assert "\n" not in json.dumps(answer)
    assert not any("forged" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("traceparent", ["x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é"])
async def test_malformed_traceparents_do_not_matter(gateway: Gateway, traceparent: str) -> None:
    assert await status_of(gateway, raw_request(CHAT, chat_body(), f"traceparent: {traceparent}")) == 200


# B141


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x"])
async def test_b141_compressed_bodies_are_refused(gateway: Gateway, encoding: str) -> None:
    body = gzip.compress(json.dumps(chat_body()).encode())
    status, answer = await gateway.post(CHAT, body, headers={"Content-Encoding": encoding})
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")


async def test_b141_a_bomb_is_not_inflated(gateway: Gateway) -> None:
    bomb = zlib.compress(b"\0" * (64 * MIB), 9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, _ = await gateway.post(CHAT, bomb, headers={"Content-Encoding": "deflate"})
    assert status == 415
    status, _ = await gateway.post("/v1/nothing", bomb, headers={"Content-Encoding": "deflate"})
    assert status == 404
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 32 * MIB


async def test_b141_bodies_above_the_limit(gateway: Gateway) -> None:
    status, answer = await gateway.post(CHAT, b" " * (MIB + 1))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    announced = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {1 << 40}\r\n\r\n"
    )
    assert await status_of(gateway, announced.encode()) == 413


async def test_b141_a_chunked_body_above_the_limit(gateway: Gateway) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with gateway.connection() as (reader, writer):
        writer.write(head.encode() + chunk * 17)
        assert (await reader.readline()).split()[1] == b"413"


async def test_a_body_of_another_type(gateway: Gateway) -> None:
    status, answer = await gateway.post(CHAT, b"model=tiny", headers={"Content-Type": "text/plain"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_client_that_never_sends_its_body_holds_nothing(gateway: Gateway) -> None:
    head = raw_request(CHAT, chat_body())[:-5]
    async with gateway.connection() as (_, writer):
        writer.write(head)
        await asyncio.sleep(0)
        assert (await gateway.chat())[0] == 200


async def test_b133_no_media_url_is_ever_opened(gateway: Gateway) -> None:
    opened = asyncio.Event()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.set()
        writer.close()

    canary = await asyncio.start_server(note, "127.0.0.1", 0)
    async with canary:
        url = f"http://127.0.0.1:{canary.sockets[0].getsockname()[1]}/"
        part = {"type": "image_url", "image_url": {"url": url}}
        status, answer = await gateway.chat(messages=[{"role": "user", "content": [part]}])
    assert (status, answer["error"]["code"]) == (400, "unsupported_content")
    assert not opened.is_set()
