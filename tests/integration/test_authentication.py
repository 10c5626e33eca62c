"""Keys at every route and every call: nothing is open that is not said to be."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from common.broker.memory_limits import MemoryLimits
from common.messages.ids import TenantId
from common.telemetry.logs import JsonFormatter
from gateway.api.authenticating import METRICS_ROUTE, OPEN_ROUTES
from gateway.api.keys import SERVICE
from gateway.server import answer_at
from tests.support.gateway_server import Gateway, chat_body, raw_request
from tests.support.keyed_gateway import KeyCabinet, bearer, running_keyed_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"


@pytest.fixture
def cabinet(tmp_path: Path) -> KeyCabinet:
    return KeyCabinet(tmp_path)


@pytest.fixture
async def key(cabinet: KeyCabinet) -> str:
    return await cabinet.issue("key-a")


@pytest.fixture
async def gateway(cabinet: KeyCabinet, key: str) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with running_keyed_gateway(engine, cabinet.entrance(MemoryLimits())) as running:
        yield running


async def answer_to(gateway: Gateway, request: bytes) -> tuple[int, bytes]:
    """Return status and head of the answer to raw bytes."""
    async with gateway.connection() as (reader, writer):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), head


def raw_get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def test_b139_every_route_asks_for_a_key_but_those_that_are_listed(gateway: Gateway, key: str) -> None:
    open_routes = []
    routes = list(gateway.runner.app.router.routes())
    assert len(routes) > 7
    for route in routes:
        path = route.resource.canonical.replace("{model}", "tiny")
        async with gateway.session.request(route.method, gateway.url + path) as response:
            if response.status == 401:
                assert response.headers["WWW-Authenticate"].startswith("Bearer")
                if route.method != "HEAD":
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
            else:
                open_routes.append(route.resource.canonical)
        async with gateway.session.request(route.method, gateway.url + path, headers=bearer(key)) as response:
            assert response.status != 401
    assert set(open_routes) == OPEN_ROUTES | {METRICS_ROUTE}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nothing",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/../v1/models",
        "/health/live/../../v1/models",
        "/health/live/%2e%2e/%2e%2e/v1/models",
        "/%76%31/models",
        "/v1/models%2ftiny",
        "/V1/models",
        "/health",
        "/health/live/",
        "/health/live%00",
        "/health/live;/v1/models",
        "/v1/models?x=/health/live",
        "/v2/models",
        "/admin",
        "/docs",
        "/",
    ],
)
async def test_b139_no_spelling_of_a_path_is_a_way_around(gateway: Gateway, path: str) -> None:
    status, head = await answer_to(gateway, raw_get(path))
    assert status in {400, 401}
    assert status == 400 or b"WWW-Authenticate: Bearer" in head


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_b139_other_methods_of_open_routes_are_closed(gateway: Gateway, method: str) -> None:
    request = raw_get("/health/live", "Content-Length: 0", method=method)
    assert (await answer_to(gateway, request))[0] == 401


async def test_open_routes_are_open(gateway: Gateway) -> None:
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert (await gateway.get(path))[0] == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("trailing", ["", "  ", "\t"])
async def test_b139_a_good_key_opens(gateway: Gateway, key: str, scheme: str, trailing: str) -> None:
    status, _ = await answer_to(gateway, raw_request(CHAT, chat_body(), f"Authorization: {scheme} {key}{trailing}"))
    assert status == 200


async def test_b139_anything_else_does_not(gateway: Gateway, key: str) -> None:
    own = f"Authorization: Bearer {key}"
    for headers in (
        (),
        ("Authorization:",),
        ("Authorization: Bearer",),
        (f"Authorization: {key}",),
        (f"Authorization: Basic {key}",),
        (f"Authorization: Bearer {key[:-1]}",),
        (own, own),
        (own, "Authorization: Bearer x"),
        (f"Api-Key: {key}",),
        (f"X-Api-Key: {key}",),
        (f"Proxy-Authorization: Bearer {key}",),
        (f"Cookie: Authorization=Bearer {key}",),
        ("X-HTTP-Method-Override: GET",),
        ("X-Original-URL: /health/live",),
        ("X-Forwarded-For: 127.0.0.1",),
    ):
        status, head = await answer_to(gateway, raw_request(CHAT, chat_body(), *headers))
        assert (status, headers) == (401, headers)
        assert key.encode() not in head
    for path in (f"{CHAT}?api_key={key}", f"{CHAT}?authorization=Bearer%20{key}", f"{CHAT}?key={key}"):
        assert (await answer_to(gateway, raw_request(path, chat_body())))[0] == 401
    assert gateway.engine.requests == []


async def test_b139_a_body_is_not_read_before_the_key(gateway: Gateway) -> None:
    head = raw_request(CHAT, chat_body(), "Content-Encoding: gzip", "Expect: 100-continue")[:-20]
    async with gateway.connection() as (reader, writer):
        writer.write(head)
        answer = await reader.readuntil(b"WWW-Authenticate: Bearer")
    assert b" 401 " in answer


async def test_b139_a_revoked_key_ends_with_the_next_reading(gateway: Gateway, cabinet: KeyCabinet, key: str) -> None:
    async with gateway.session.get(f"{gateway.url}/v1/models", headers=bearer(key)) as response:
        assert response.status == 200
    await cabinet.store.remove(TenantId("key-a"))
    await gateway.runner.app[SERVICE].entrance.door.refresh()
    async with gateway.session.get(f"{gateway.url}/v1/models", headers=bearer(key)) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_metrics_can_be_closed(cabinet: KeyCabinet, key: str) -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    async with running_keyed_gateway(engine, cabinet.entrance(MemoryLimits()), open_metrics=False) as gateway:
        assert (await gateway.get("/metrics"))[0] == 401
        async with gateway.session.get(f"{gateway.url}/metrics", headers=bearer(key)) as response:
            assert response.status == 200


async def test_closed_metrics_are_open_at_the_socket_of_the_process_and_nothing_else_is(
    cabinet: KeyCabinet, key: str
) -> None:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    with TemporaryDirectory() as folder:  # a socket's path must be short
        async with running_keyed_gateway(engine, cabinet.entrance(MemoryLimits()), open_metrics=False) as gateway:
            await answer_at(gateway.runner, Path(folder) / "s")
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{folder}/s")) as operator:
                async with operator.get("http://gateway/metrics") as response:
                    assert response.status == 200
                async with operator.get("http://gateway/v1/models") as response:
                    assert response.status == 401


async def test_refusals_are_counted_by_reason_and_told_without_the_key(
    gateway: Gateway, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in ({}, bearer("tdm-wrong")):
        assert (await gateway.post(CHAT, chat_body(), headers=sent))[0] == 401
    assert 'tandem_requests_refused_total{reason="key"} 2.0' in (await gateway.get("/metrics"))[1]
    assert key not in caplog.text
    assert "tdm-wrong" not in caplog.text


async def test_a_key_that_is_not_good_for_a_model_does_not_see_it(gateway: Gateway, cabinet: KeyCabinet) -> None:
    other = bearer(await cabinet.issue("key-b", models=("other",)))
    await gateway.runner.app[SERVICE].entrance.door.refresh()
    for model in ("tiny", "nobody-has-it"):
        status, answer = await gateway.post(CHAT, chat_body(model=model), headers=other)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (403, "model_not_allowed", "model")
    async with gateway.session.get(f"{gateway.url}/v1/models", headers=other) as response:
        assert (await response.json())["data"] == []
    async with gateway.session.get(f"{gateway.url}/v1/models/tiny", headers=other) as response:
        assert response.status == 403
    assert 'tandem_requests_refused_total{reason="permission"} 3.0' in (await gateway.get("/metrics"))[1]


async def test_b061_a_key_has_a_highest_priority(gateway: Gateway, cabinet: KeyCabinet) -> None:
    headers = bearer(await cabinet.issue("key-b", max_priority=3))
    await gateway.runner.app[SERVICE].entrance.door.refresh()
    status, answer = await gateway.post(CHAT, chat_body(priority=4), headers=headers)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (403, "priority_not_allowed", "priority")
    assert (await gateway.post(CHAT, chat_body(priority=3), headers=headers))[0] == 200
    assert [(request.tenant, request.priority) for request in gateway.engine.requests] == [("key-b", 3)]


async def test_a_key_of_low_priority_is_served_without_naming_one(gateway: Gateway, cabinet: KeyCabinet) -> None:
    headers = bearer(await cabinet.issue("key-b", max_priority=-2))
    await gateway.runner.app[SERVICE].entrance.door.refresh()
    assert (await gateway.post(CHAT, chat_body(), headers=headers))[0] == 200
    assert (await gateway.post(CHAT, chat_body(priority=-3), headers=headers))[0] == 200
    assert (await gateway.post(CHAT, chat_body(priority=0), headers=headers))[0] == 403
    assert (await gateway.post("/tokenize", {"model": "tiny", "prompt": "hi"}, headers=headers))[0] == 200
    assert [request.priority for request in gateway.engine.requests] == [-2, -3]


async def test_log_lines_name_the_keys_id(gateway: Gateway, key: str, caplog: pytest.LogCaptureFixture) -> None:
    formatter = JsonFormatter("gateway")
    lines: list[dict[str, object]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(formatter.format(record)))

    collector = Collector()
    logging.getLogger("gateway.request_record").addHandler(collector)
    caplog.set_level(logging.INFO)
    try:
        assert (await gateway.post(CHAT, chat_body(), headers=bearer(key)))[0] == 200
    finally:
        logging.getLogger("gateway.request_record").removeHandler(collector)
    assert [line["tenant"] for line in lines if line["message"] == "request ended"] == ["key-a"]
