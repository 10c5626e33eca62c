"""Around every call of the gRPC listener: whoever makes it has shown a key in its metadata, as with HTTP.

Denied by default, methods that do not exist included; only the health service is open.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc

from common.errors import AuthenticationFailed, Unavailable
from common.telemetry.logs import tenant
from gateway.api_keys import Door
from gateway.callers import ANYONE, Caller

METADATA_KEY = "authorization"
OPEN_METHODS = frozenset(f"/grpc.health.v1.Health/{method}" for method in ("Check", "List", "Watch"))

caller: ContextVar[Caller] = ContextVar("caller")
"""Who makes the call that the current task serves. Without a default: a call that was not looked at fails."""

if TYPE_CHECKING:  # the classes of grpc are generic in its stubs alone
    Handler = grpc.RpcMethodHandler[Any, Any]
    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in whose caller `door` knows."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self, continuation: "Continuation", handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the handler of a call, or one that refuses it."""
        if handler_call_details.method in OPEN_METHODS:
            caller.set(ANYONE)
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        sent = [str(value) for key, value in metadata if key == METADATA_KEY]
        try:
            found = await self._door.caller(sent)
        except (AuthenticationFailed, Unavailable) as error:
            return _refusing(error)
        caller.set(found)
        tenant.set(found.tenant)
        return await continuation(handler_call_details)


def _refusing(error: AuthenticationFailed | Unavailable) -> "Handler":
    """Return a handler for calls of any kind that fails them before it has read anything; the root makes a status."""

    async def refuse(_: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
