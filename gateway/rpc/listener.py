"""The gRPC listener for clients. The same keys open it as the HTTP API beside it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from common.errors import InvalidSetting
from common.rpc.server import bind
from gateway.api_keys import Door
from gateway.rpc.authenticating import KeyInterceptor
from proto.tandem.v1.generate_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

MAX_MESSAGE_BYTES = 1 << 20
MAX_CALLS = 256
"""Calls under way at once; more are refused with RESOURCE_EXHAUSTED."""


@asynccontextmanager
async def serve_rpc(
    generation: GenerationServicer, door: Door, host: str, port: int, *, reuse_port: bool
) -> AsyncIterator[int]:
    """Serve whom `door` knows while entered, and give the port; 0 takes any free one.

    Raises `InvalidSetting` if the port is taken.

    With `reuse_port` several gateways share it; without, two clusters on one port would get each other's calls.
    """
    options = (
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    )
    server = grpc.aio.server(interceptors=(KeyInterceptor(door),), options=options, maximum_concurrent_rpcs=MAX_CALLS)
    add_GenerationServicer_to_server(generation, server)
    try:
        bound = bind(server, host, port)
    except InvalidSetting as error:
        raise InvalidSetting("rpc_port", port, f"cannot listen on {host}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)
