"""A gateway without a cluster: speaks as much of the OpenAI API as the command line uses, with scripted answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeGateway:
    """Answers every question with `tokens`; what was asked is in `bodies`. `fail` chooses a way to go wrong."""

    tokens: tuple[str, ...] = ("Hel", "lo", "!")
    fail: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}] if self.fail != "no models" else []})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fail == "refuse":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        is_chat = request.path.endswith("chat/completions")
        for token in self.tokens:
            choice = {"delta": {"content": token}} if is_chat else {"text": token}
            await _send(response, {"choices": [{"index": 0, **choice}]})
            if self.fail == "hang":
                await asyncio.Event().wait()
        if self.fail == "midway":
            await _send(response, {"error": {"message": "worker lost"}})
            return response
        usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": len(self.tokens)}
        await _send(response, {"choices": [], "usage": usage})
        if self.fail != "cut":
            await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def running(gateway: FakeGateway) -> AsyncIterator[FakeGateway]:
    """Serve `gateway` on a free port; its `url` is set meanwhile."""
    app = web.Application()
    app.router.add_get("/v1/models", gateway.models)
    app.router.add_post("/v1/completions", gateway.generate)
    app.router.add_post("/v1/chat/completions", gateway.generate)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await runner.cleanup()


async def _send(response: web.StreamResponse, payload: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")
