"""An authenticated gRPC listener: every call must carry the cluster's secret."""

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from common.errors import InvalidSetting
from common.rpc.options import COMMON_OPTIONS, SECRET_KEY

SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port that is taken must be an error, not a share of its traffic
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
)

if TYPE_CHECKING:  # these classes take parameters in the stubs alone
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _MaybeHandler = grpc.RpcMethodHandler[Any, Any] | None
    _Context = grpc.aio.ServicerContext[Any, Any]


class _SecretCheck(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to callers without the secret, before any handler runs."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refusal: _Handler = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[_MaybeHandler]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_MaybeHandler":
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get(SECRET_KEY, "")
        if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret):
            return self._refusal
        return await continuation(handler_call_details)


async def _refuse(request: object, context: "_Context") -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster's secret is missing or wrong")


def make_server(secret: str) -> grpc.aio.Server:
    """Return a server without services or ports that lets only callers with `secret` in."""
    return grpc.aio.server(interceptors=(_SecretCheck(secret),), options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind to an address, 0 taking any free port; return the port or raise `InvalidSetting`."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise InvalidSetting("port", port, f"cannot listen on {host}: {error}") from error
    if bound == 0:
        raise InvalidSetting("port", port, f"cannot listen on {host}")
    return bound
