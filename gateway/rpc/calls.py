"""The root of every call: its id, its clock, its span, and a status for whatever goes wrong in it.

Behaviours below it are coroutines that write their messages themselves: a generator whose call is cancelled while a
message is being written would be closed some time later, and what it holds with it. They raise errors of our tree and
never abort.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from common.broker.limits import Quota
from common.errors import InvalidRequest
from common.messages.ids import RequestId
from common.telemetry.logs import request_id
from common.telemetry.metrics import GatewayMetrics
from gateway.error_notes import note_error
from gateway.problems import problem_of
from gateway.quota_fields import quota_fields
from gateway.request_ids import HEADER, echoed_id, new_request_id
from gateway.rpc.statuses import ERROR_CODE, Status, status_of
from gateway.spans import RequestSpan, rpc_span
from proto.tandem.v1 import generate_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"]
OWN_METHODS = {f"/{SERVICE.full_name}/{method.name}": method.name for method in SERVICE.methods}
"""Names of the methods of our own by their paths: only their calls have spans and are counted."""

_TOO_SLOW = Status(grpc.StatusCode.CANCELLED, "The client takes no more messages.", ((ERROR_CODE, "client_too_slow"),))

Handler = Any
"""`grpc.RpcMethodHandler`, which is generic in its stubs alone."""
Context = Any
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(slots=True)
class Call:
    """A call of one of our own methods. `outcome` and `error` are what its span ends with; `quota` is what its caller
    has left, if its limits were asked.
    """

    request: RequestId
    span: RequestSpan
    arrived_s: float = field(default_factory=time.monotonic)
    outcome: grpc.StatusCode = grpc.StatusCode.CANCELLED
    error: str = "aborted"
    quota: Quota | None = None

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """What its trailing metadata tells, however it ends."""
        return () if self.quota is None else tuple(quota_fields(self.quota).items())

    def note_quota(self, quota: Quota) -> None:
        """Take in what its caller has left."""
        self.quota = quota


current: ContextVar[Call] = ContextVar("current")
"""The call that the current task serves; only in our own methods."""


class Root(grpc.aio.ServerInterceptor):
    """Must be the outermost interceptor."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler of a call, inside its root."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = OWN_METHODS.get(handler_call_details.method)
        metadata = tuple(handler_call_details.invocation_metadata or ())
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        parse = None if handler.request_streaming else handler.request_deserializer

        async def run(request: Any, context: Context) -> Any:  # noqa: ANN401, RET503 - `_abort` never returns
            call = None if method is None else _call(method, metadata)
            with self._observed(method, call):
                status = _TOO_SLOW
                try:
                    if call is not None:
                        sent = _first(metadata, HEADER)
                        await context.send_initial_metadata(((HEADER, echoed_id(sent, call.request)),))
                    response = await behaviour(request if parse is None else _parsed(request, parse), context)
                except (ConnectionError, grpc.aio.InternalError):  # the latter is gRPC's word for a call that is over
                    pass
                except Exception as error:  # noqa: BLE001 - the root of the call: nothing may leave it unanswered
                    status = self._status(error, call)
                else:
                    if call is not None:
                        call.outcome, call.error = grpc.StatusCode.OK, ""
                        context.set_trailing_metadata(call.trailing)
                    return response
            # Behind a message that its client does not take this waits until the client takes it or is gone; nothing
            # but the call itself is held then.
            await _abort(context, status, () if call is None else call.trailing)

        return _remade(handler, run, parse is None)

    @contextmanager
    def _observed(self, method: str | None, call: Call | None) -> Iterator[None]:
        if method is None or call is None:
            yield
            return
        current.set(call)
        request_id.set(call.request)
        try:
            yield
        finally:
            self._metrics.note_call(method, call.outcome.name)
            call.span.end(call.outcome.value[0], call.error)

    def _status(self, error: Exception, call: Call | None) -> Status:
        status = status_of(error)
        is_ours = note_error(self._metrics, error, problem_of(error))
        if call is not None:
            call.outcome, call.error = status.code, dict(status.trailing)[ERROR_CODE] if is_ours else ""
        return status


async def _abort(
    context: "grpc.aio.ServicerContext[Any, Any]", status: Status, trailing: tuple[tuple[str, str], ...]
) -> NoReturn:
    try:
        await context.abort(status.code, status.message, (*status.trailing, *trailing))
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the client is gone") from error


def metadata_values(metadata: Metadata, name: str) -> list[str]:
    """Return the values that a call's metadata has under a name."""
    return [value for key, value in metadata if key == name and isinstance(value, str)]


def _call(method: str, metadata: Metadata) -> Call:
    request = new_request_id()
    traceparent, tracestate = _first(metadata, "traceparent") or "", metadata_values(metadata, "tracestate")
    return Call(request, rpc_span(request, SERVICE.full_name, method, traceparent, ",".join(tracestate)))


def _first(metadata: Metadata, name: str) -> str | None:
    return next(iter(metadata_values(metadata, name)), None)


def _parsed(request: bytes, parse: Callable[[bytes], Any]) -> Any:  # noqa: ANN401 - the message of some method
    try:
        return parse(request)
    except DecodeError as error:
        raise InvalidRequest("The message cannot be read.") from error


def _remade(handler: Handler, run: Callable[..., Awaitable[Any]], keeps_parser: bool) -> Handler:
    """Return a handler of the same kind for another behaviour."""
    parse = handler.request_deserializer if keeps_parser else None
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(run, parse, handler.response_serializer)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(run, parse, handler.response_serializer)
    return grpc.stream_stream_rpc_method_handler(run, parse, handler.response_serializer)
