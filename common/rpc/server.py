"""The internal gRPC listener of a process; every call must carry the cluster's secret."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from common.errors import InvalidSetting
from common.rpc.options import COMMON_OPTIONS
from common.rpc.secret import METADATA_KEY, checked_secret

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two processes on one port would share its calls silently
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # what the channels of `channels.py` need
)


def make_server(secret: str) -> grpc.aio.Server:
    """Return a server for the running event loop. Add servicers, `bind`, then `await server.start()`.

    Raises `InvalidSetting` if the secret cannot be used.
    """
    return grpc.aio.server(interceptors=[_Authentication(checked_secret(secret))], options=_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind the server to an address, port 0 for any; return the port. `credentials` None: without TLS.

    Raises `InvalidSetting`.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not 0 <= port < 65536:  # gRPC would silently take the rest of a division
        raise InvalidSetting("port", port, "a port is a number from 0 to 65535")
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise InvalidSetting("address", address, "the internal listener cannot be bound there") from error


class _Authentication(grpc.aio.ServerInterceptor):
    """Answers calls without the secret before their message is read."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Let the call through or refuse it."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        shown = metadata.get(METADATA_KEY, "")
        if hmac.compare_digest(shown if isinstance(shown, bytes) else shown.encode(), self._secret):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: object, context: "grpc.aio.ServicerContext[Any, Any]") -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster's secret is missing or differs")
