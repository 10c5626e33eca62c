"""Channels to peers, one per address, each good for one incarnation of the process behind it."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from common.messages.ids import Epoch
from common.rpc.options import COMMON_OPTIONS
from common.rpc.secret import METADATA_KEY, checked_secret

_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel means a new connection
    ("grpc.enable_http_proxy", 0),  # peers are never behind the proxy that the environment may name
)


class Channels:
    """Owns every outgoing channel of a process. Use it on one event loop."""

    def __init__(self, secret: str) -> None:
        secret = checked_secret(secret)
        self._interceptors = (_UnaryUnarySecret(secret), _UnaryStreamSecret(secret))
        self._channels: dict[str, tuple[Epoch, grpc.aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, address: str, epoch: Epoch) -> grpc.aio.Channel:
        """Return the channel to that incarnation; connecting happens with the first call.

        A new epoch at an address drops the channel of the old one: its calls end as cancelled.
        """
        known = self._channels.get(address)
        if known is not None and known[0] == epoch:
            return known[1]
        self.drop(address)
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=list(self._interceptors))
        self._channels[address] = (epoch, channel)
        return channel

    def drop(self, address: str) -> None:
        """Forget the address and close its channel; nothing happens if there is none."""
        known = self._channels.pop(address, None)
        if known is None:
            return
        closing = asyncio.get_running_loop().create_task(known[1].close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every channel."""
        for address in list(self._channels):
            self.drop(address)
        await asyncio.gather(*self._closing)


class _UnaryUnarySecret(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: object
    ) -> Any:  # noqa: ANN401  # whatever call object gRPC makes
        return await continuation(_with_secret(client_call_details, self._secret), request)


class _UnaryStreamSecret(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: object
    ) -> Any:  # noqa: ANN401  # whatever call object gRPC makes
        return await continuation(_with_secret(client_call_details, self._secret), request)


def _with_secret(details: grpc.aio.ClientCallDetails, secret: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.set_all(METADATA_KEY, [secret])
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )
