"""The gRPC listener for clients. The same keys open it as the HTTP API beside it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from common.errors import InvalidSetting
from common.rpc.server import bind
from gateway.rpc.authenticating import KeyInterceptor
from gateway.rpc.calls import Root
from gateway.rpc.health import Health
from gateway.rpc.reflection import reflection_handlers
from gateway.service import Service
from proto.tandem.v1.generate_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

MAX_OTHER_CALLS = 256
"""Calls at once beside the requests that the gateway admits; more are refused with RESOURCE_EXHAUSTED."""

CLOSE_TIMEOUT_S = 0.5
"""What calls get to write their status when the listener closes."""

LONG_S = 86_400.0

_OPTIONS = (
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message must not become a large one
    ("grpc.keepalive_time_ms", 30_000),  # a client whose host has gone is found within 40 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # of clients that do the same
)


@dataclass(frozen=True, slots=True)
class RpcAddress:
    """Where to listen; port 0 takes any free one. `credentials` None: without TLS.

    With `reuse_port` several gateways share the port; without, two clusters on one port would get each other's calls.
    """

    host: str
    port: int = 0
    reuse_port: bool = False
    credentials: grpc.ServerCredentials | None = None


class RpcListener:
    """Made by `serve_rpc`; knows its `port`."""

    def __init__(self, server: grpc.aio.Server, health: Health, port: int) -> None:
        self._server = server
        self._health = health
        self._leaving: asyncio.Task[None] | None = None
        self.port = port

    def leave(self) -> None:
        """Take no more connections and calls, and tell clients to connect elsewhere; calls under way go on."""
        self._health.leave()
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._server.stop(LONG_S))

    async def close(self) -> None:
        """End the calls that are left."""
        self._health.leave()
        await self._server.stop(CLOSE_TIMEOUT_S)
        if self._leaving is not None:
            await self._leaving


@asynccontextmanager
async def serve_rpc(
    generation: GenerationServicer, service: Service, address: RpcAddress
) -> AsyncIterator[RpcListener]:
    """Serve whom the service's door knows while entered.

    Raises `InvalidSetting` if the port is taken.
    """
    options = (
        *_OPTIONS,
        ("grpc.so_reuseport", int(address.reuse_port)),
        ("grpc.max_receive_message_length", service.settings.max_body_bytes),
    )
    server = grpc.aio.server(
        interceptors=(Root(service.metrics), KeyInterceptor(service.entrance.door)),
        options=options,
        maximum_concurrent_rpcs=service.settings.max_concurrent_requests + MAX_OTHER_CALLS,
    )
    health = Health(service)
    add_GenerationServicer_to_server(generation, server)
    add_HealthServicer_to_server(health, server)
    server.add_generic_rpc_handlers(reflection_handlers())
    try:
        bound = bind(server, address.host, address.port, address.credentials)
    except InvalidSetting as error:
        raise InvalidSetting("rpc_port", address.port, f"cannot listen on {address.host}") from error
    await server.start()
    listener = RpcListener(server, health, bound)
    try:
        yield listener
    finally:
        await listener.close()
