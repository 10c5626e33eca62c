"""A gateway's gRPC listener in front of the same service as its HTTP API, and a client of it."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry

from common.messages.ids import RequestId, TenantId
from common.telemetry.metrics import GatewayMetrics
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.entrance import OPEN_ENTRANCE, Entrance
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, RpcListener, serve_rpc
from gateway.service import Service
from gateway.settings import GatewaySettings
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

HOST = "127.0.0.1"

Cancel = Callable[[RequestId, TenantId], Awaitable[bool]]


@dataclass
class RpcGateway:
    """A running gateway and one channel to it."""

    http: Gateway
    listener: RpcListener
    channel: grpc.aio.Channel

    @property
    def engine(self) -> ScriptedEngine:
        return self.http.engine

    @property
    def service(self) -> Service:
        return service_of(self.http)

    @property
    def stub(self) -> "GenerationAsyncStub":
        return GenerationStub(self.channel)

    async def generate(self, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
        """Return all messages of an answer."""
        return [message async for message in self.stub.Generate(request, **call)]

    async def read_into(self, answer: list[pb.GenerateResponse], call: AsyncIterable[pb.GenerateResponse]) -> None:
        """Append all messages of an answer; what came before an error is there then."""
        async for message in call:
            answer.append(message)  # noqa: PERF401 - see above

    async def refused(self, request: pb.GenerateRequest, **call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
        """Return the status of a request that fails, and its trailing metadata."""
        try:
            answer = await self.generate(request, **call)
        except grpc.aio.AioRpcError as error:
            return error.code(), trailing_of(error)
        raise AssertionError(answer)


def trailing_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Return the trailing metadata of a call that failed, and its message."""
    return {key: str(value) for key, value in error.trailing_metadata() or ()} | {"details": error.details() or ""}


async def never(request: RequestId, tenant: TenantId) -> bool:
    """Cancel nothing."""
    return False


@asynccontextmanager
async def running_rpc_gateway(
    engine: ScriptedEngine, entrance: Entrance = OPEN_ENTRANCE, *, cancel: Cancel = never, **settings: Any
) -> AsyncIterator[RpcGateway]:
    """Run a gateway with both listeners until the block is left."""
    async with (
        running_gateway(engine, entrance, **settings) as http,
        serve_rpc(Generation(service_of(http), cancel), service_of(http), RpcAddress(HOST)) as listener,
        channel_to(listener) as channel,
    ):
        yield RpcGateway(http, listener, channel)


def service_of(http: Gateway) -> Service:
    """Return what a gateway's handlers share."""
    service: Service = http.runner.app[SERVICE]
    return service


def lone_service(engine: ScriptedEngine, entrance: Entrance = OPEN_ENTRANCE) -> Service:
    """Return the service of a gateway that listens nowhere."""
    app = create_app(engine, GatewaySettings(), GatewayMetrics(CollectorRegistry()), entrance)
    return app[SERVICE]


def channel_to(listener: RpcListener, options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
    """Return a channel of its own connection."""
    own = ("grpc.use_local_subchannel_pool", 1)
    return grpc.aio.insecure_channel(f"{HOST}:{listener.port}", options=(own, *options))


def text_of(messages: Sequence[pb.GenerateResponse], choice: int = 0) -> str:
    """Return the text of a choice."""
    deltas = [message.delta for message in messages if message.HasField("delta")]
    return "".join(delta.text for delta in deltas if delta.choice == choice)
