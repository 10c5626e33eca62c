"""Channels to other processes of the cluster, one per address and epoch, each carrying the cluster's secret.

A restart at the same address is a new process: its epoch gets a new channel, and the old one is closed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from common.messages.ids import Epoch
from common.rpc.options import COMMON_OPTIONS, SECRET_KEY

CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit a dead connection
)


class Channels:
    """Owned by one event loop; `close` ends them all."""

    def __init__(self, secret: str) -> None:
        self._interceptors = (_UnarySecret(secret), _StreamSecret(secret))
        self._channels: dict[str, tuple[Epoch, grpc.aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, address: str, epoch: Epoch) -> grpc.aio.Channel:
        """Return the channel to that incarnation."""
        known = self._channels.get(address)
        if known is not None and known[0] == epoch:
            return known[1]
        if known is not None:
            task = asyncio.create_task(known[1].close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=self._interceptors)
        self._channels[address] = (epoch, channel)
        return channel

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for _, channel in channels.values()), *self._closing)


class _UnarySecret(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,  # noqa: ANN401 - any message
    ) -> Any:  # noqa: ANN401 - a call object of grpc
        return await continuation(_with_secret(client_call_details, self._secret), request)


class _StreamSecret(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,  # noqa: ANN401 - any message
    ) -> Any:  # noqa: ANN401 - a call object of grpc
        return await continuation(_with_secret(client_call_details, self._secret), request)


def _with_secret(details: grpc.aio.ClientCallDetails, secret: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), (SECRET_KEY, secret))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )
