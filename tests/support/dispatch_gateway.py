"""The HTTP side of a gateway in front of a `DispatchHarness`: from a client's bytes to scripted workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from common.telemetry.metrics import GatewayMetrics
from gateway.app import create_app
from gateway.entrance import OPEN_ENTRANCE
from gateway.server import close, port_of, serve
from gateway.settings import GatewaySettings
from tests.support.broker_records import FINGERPRINT
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness
from tests.support.gateway_server import chat_body, parse_events
from tests.support.polling import until
from tests.support.scripted_worker import MODEL
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card


@dataclass
class DispatchGateway:
    """A running gateway."""

    port: int
    session: aiohttp.ClientSession

    async def chat(self, headers: dict[str, str], *, streams: bool) -> tuple[int, Any]:
        """Return the status, and the error or answer: of a stream, its last event."""
        body = chat_body(model=MODEL, stream=streams, max_tokens=20)
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, parse_events(await response.read())[-1]


@asynccontextmanager
async def dispatch_gateway(harness: DispatchHarness, **settings: Any) -> AsyncIterator[DispatchGateway]:
    """Serve the harness' dispatcher; at least one worker is there."""
    card = replace(tiny_card(byte_level_tokenizer(), max_context=1024), model=MODEL, fingerprint=FINGERPRINT)
    await harness.broker.registry.publish_card(card)
    await until(lambda: harness.roster.cards(), "the card", DEADLINE_S)
    app = create_app(
        harness.dispatcher, GatewaySettings(**settings), GatewayMetrics(CollectorRegistry()), OPEN_ENTRANCE
    )
    runner = await serve(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        try:
            yield DispatchGateway(port_of(runner), session)
        finally:
            await close(runner, 0.01)
