"""A gateway that serves HTTP and gRPC over TLS, and one way to ask it per transport."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import grpc
import trustme
from prometheus_client import CollectorRegistry

from common.telemetry.metrics import GatewayMetrics
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.certificates import Certificates
from gateway.entrance import OPEN_ENTRANCE
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, RpcListener, serve_rpc
from gateway.server import close, port_of, serve
from gateway.service import Service
from gateway.settings import GatewaySettings
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.certificates import Authority
from tests.support.gateway_server import chat_body, parse_events
from tests.support.gateway_server import text_of as http_text_of
from tests.support.rpc_gateway import HOST, never, text_of
from tests.support.scripted_engine import ScriptedEngine

DEADLINE_S = 10.0


class Refused(Exception):
    """No trusted connection, or one that the gateway has closed."""


@dataclass(frozen=True)
class TlsGateway:
    """A running gateway."""

    engine: ScriptedEngine
    service: Service
    port: int
    rpc: RpcListener

    async def ask(
        self, transport: str, trusted: Authority | None, client: trustme.LeafCert | None = None, host: str = HOST
    ) -> str:
        """Return the text of a streamed answer; `trusted` None: a client that speaks no TLS. Raises `Refused`."""
        async with asyncio.timeout(DEADLINE_S):
            if transport == "http":
                return await self._ask_http(trusted, client, host)
            return await self._ask_rpc(trusted, client, host)

    async def _ask_http(self, trusted: Authority | None, client: trustme.LeafCert | None, host: str) -> str:
        scheme = "http" if trusted is None else "https"
        connector = aiohttp.TCPConnector(ssl=True if trusted is None else trusted.context(client))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"{scheme}://{host}:{self.port}/v1/chat/completions"
            try:
                async with session.post(url, json=chat_body(stream=True)) as response:
                    return http_text_of(parse_events(await response.read()))
            except aiohttp.ClientError as error:
                raise Refused(repr(error)) from error

    async def _ask_rpc(self, trusted: Authority | None, client: trustme.LeafCert | None, host: str) -> str:
        request = pb.GenerateRequest(model="tiny", text="hi")
        async with self.channel(trusted, client, host) as channel:
            try:
                return text_of([message async for message in GenerationStub(channel).Generate(request)])
            except grpc.aio.AioRpcError as error:
                raise Refused(f"{error.code().name}: {error.details()}") from error

    def channel(
        self, trusted: Authority | None, client: trustme.LeafCert | None = None, host: str = HOST
    ) -> grpc.aio.Channel:
        """Return a channel of its own connection."""
        address, options = f"{host}:{self.rpc.port}", (("grpc.use_local_subchannel_pool", 1),)
        if trusted is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, trusted.credentials(client), options=options)


@asynccontextmanager
async def running_tls_gateway(engine: ScriptedEngine, certificates: Certificates) -> AsyncIterator[TlsGateway]:
    """Run a gateway until the block is left."""
    app = create_app(engine, GatewaySettings(), GatewayMetrics(CollectorRegistry()), OPEN_ENTRANCE)
    service = app[SERVICE]
    runner = await serve(app, HOST, 0, tls=certificates.context)
    address = RpcAddress(HOST, credentials=certificates.credentials())
    async with serve_rpc(Generation(service, never), service, address) as rpc:
        try:
            yield TlsGateway(engine, service, port_of(runner), rpc)
        finally:
            await close(runner, 0.01, on_closed=rpc.leave)
