"""Requests that attack the server's parser, memory or logs."""

import asyncio
import gzip
import json
import re
import resource
import zlib
from collections.abc import AsyncIterator
from typing import Any

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
    return (await answer_to(gateway, request))[0]


async def answer_to(gateway: Gateway, request: bytes) -> tuple[int, bytes, Any]:
    """Return status, head and JSON of the answer to raw bytes."""
    async with gateway.connection() as (reader, writer):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b"null"
    return int(head.split()[1]), head, json.loads(body)


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
    ("header", "expected"),
    [
        ("X-Request-Id: " + "x" * MIB, (431, "header_too_large")),
        ("traceparent: " + "0" * MIB, (431, "header_too_large")),
        ("\r\n".join(f"X-{number}: 1" for number in range(10_000)), (400, "malformed_http")),
        ("X-Request-Id: a\x00b", (400, "malformed_http")),
        ("X-Request-Id: a\r\n\r b", (400, "malformed_http")),
        ("Transfer-Encoding: chunked", (400, "malformed_http")),
        ("Content-Length: 5", (400, "malformed_http")),
        ("no colon", (400, "malformed_http")),
    ],
    ids=["long id", "long traceparent", "many headers", "NUL", "CR", "TE and CL", "two lengths", "no colon"],
)
async def test_b140_headers_that_are_refused(
    gateway: Gateway, header: str, expected: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    status, head, answer = await answer_to(gateway, raw_request(CHAT, chat_body(), header))
    assert (status, answer["error"]["code"]) == expected
    assert answer["error"]["type"] == "invalid_request_error"
    assert re.search(rb"(?i)^x-request-id: [0-9a-f]{32}\r$", head, re.MULTILINE)
    assert gateway.engine.requests == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /" + b"x" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n", (431, "header_too_large")),
        (b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 100 + b"\r\n\r\n", (400, "malformed_http")),
        (b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n", (400, "malformed_http")),
        (b"GET /health/live HTTP/1.1\r\nHost: x\r\nExpect: script\r\n\r\n", (417, "unknown_expect")),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", (400, "malformed_http")),
    ],
    ids=["long line", "TLS", "no method", "unknown expectation", "no version"],
)
async def test_b140_what_is_no_http_is_answered_by_the_error_object_and_not_repeated(
    gateway: Gateway, request_bytes: bytes, expected: tuple[int, str]
) -> None:
    status, head, answer = await answer_to(gateway, request_bytes)
    assert (status, answer["error"]["code"]) == expected
    assert b"script" not in head + json.dumps(answer).encode()


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


MEDIA = [
    "http://127.0.0.1:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://2130706433:{port}/",
    "http://localhost:{port}/",
    "http://169.254.169.254/",
    "file:///etc/passwd",
    "data:image/png;base64," + "A" * (MIB // 2),
]


@pytest.mark.parametrize("media", MEDIA, ids=lambda media: media[:20])
async def test_b133_no_media_url_is_ever_opened(gateway: Gateway, media: str) -> None:
    opened = asyncio.Event()

    def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.set()
        writer.close()

    canary = await asyncio.start_server(note, "127.0.0.1", 0)
    async with canary:
        url = media.format(port=canary.sockets[0].getsockname()[1])
        parts: list[tuple[str, str, dict[str, Any]]] = [
            (CHAT, "messages", {"type": "image_url", "image_url": {"url": url}}),
            (CHAT, "messages", {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}),
            ("/v1/responses", "input", {"type": "input_image", "image_url": url}),
            ("/v1/responses", "input", {"type": "input_file", "file_url": url}),
            ("/tokenize", "messages", {"type": "video_url", "video_url": {"url": url}}),
        ]
        for path, field, part in parts:
            body = {"model": "tiny", field: [{"role": "user", "content": [part]}]}
            status, answer = await gateway.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "unsupported_content")
            assert len(json.dumps(answer)) < 1000
    assert not opened.is_set()
