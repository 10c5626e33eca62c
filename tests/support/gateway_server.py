"""A real gateway on a free port in front of a scripted engine, and ways to talk to it down to the raw bytes."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from common.telemetry.metrics import GatewayMetrics
from gateway.app import create_app
from gateway.entrance import OPEN_ENTRANCE, Entrance
from gateway.server import close, port_of, serve
from gateway.settings import GatewaySettings
from tests.support.scripted_engine import ScriptedEngine

DEADLINE_S = 5.0


@dataclass
class Gateway:
    """A running gateway."""

    engine: ScriptedEngine
    port: int
    session: aiohttp.ClientSession
    runner: Any = field(repr=False, default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """Return status and parsed body."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **kwargs.pop("headers", {})}
        async with self.session.post(self.url + path, data=data, headers=headers, **kwargs) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "hello"} | fields)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the parsed events of a stream; "[DONE]" stays text."""
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return parse_events(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A raw TCP connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def running_gateway(
    engine: ScriptedEngine, entrance: Entrance = OPEN_ENTRANCE, **settings: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway until the block is left."""
    app = create_app(engine, GatewaySettings(**settings), GatewayMetrics(CollectorRegistry()), entrance)
    runner = await serve(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        try:
            yield Gateway(engine, port_of(runner), session, runner)
        finally:
            await close(runner, grace_s=0.01)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields


def raw_request(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """Return the bytes of a POST."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def parse_events(body: bytes) -> list[Any]:
    """Return the events of a finished stream, strictly: every block is one data line or one comment."""
    text = body.decode("utf-8")
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        assert "\n" not in block
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data, parse_constant=_refuse))
    return events


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def text_of(events: list[Any]) -> str:
    """Return the concatenated text of a stream's chunks."""
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
