"""A collector of spans: serves the OTLP gRPC service that processes export to, and keeps what came."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class SeenSpan:
    """A span as it was exported; ids in hex, `parent` "" for a root, `links` the ids of the linked spans."""

    service: str
    instance: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    tracestate: str
    error: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


class Collector:
    """Listens on a free port of this host while entered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[SeenSpan] = []
        self._bodies: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Export": export})
        self._server.add_generic_rpc_handlers((handlers,))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def spans(self, trace: str | None = None) -> list[SeenSpan]:
        """Return what has come so far, of one trace or all."""
        with self._changed:
            return [span for span in self._spans if trace in (None, span.trace)]

    def bodies(self) -> bytes:
        """Return every byte that has come."""
        with self._changed:
            return b"".join(self._bodies)

    def until(self, condition: Callable[[list[SeenSpan]], bool], deadline_s: float = 10.0) -> list[SeenSpan]:
        """Wait until `condition` holds for all spans; return them."""
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while not condition(self._spans):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    seen = [(span.service, span.name, span.trace) for span in self._spans[-30:]]
                    raise AssertionError(f"not within {deadline_s} s; the last spans: {seen}")
                self._changed.wait(left_s)
            return list(self._spans)

    def trace(self, trace: str, num_spans: int) -> dict[str, SeenSpan]:
        """Return the spans of a trace by name once there are so many."""
        self.until(lambda spans: sum(span.trace == trace for span in spans) >= num_spans)
        found = self.spans(trace)
        by_name = {span.name: span for span in found}
        assert len(by_name) == len(found) == num_spans, sorted(span.name for span in found)
        return by_name

    def _export(self, request: ExportTraceServiceRequest, _: grpc.ServicerContext) -> ExportTraceServiceResponse:
        with self._changed:
            self._bodies.append(request.SerializeToString())
            for of_process in request.resource_spans:
                resource = _plain(of_process.resource.attributes)
                for scope in of_process.scope_spans:
                    self._spans += [_seen(span, resource) for span in scope.spans]
            self._changed.notify_all()
        return ExportTraceServiceResponse()


def _seen(span: Span, resource: Mapping[str, Any]) -> SeenSpan:
    return SeenSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple(link.span_id.hex() for link in span.links),
        tracestate=span.trace_state,
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
    )


def _plain(attributes: "list[KeyValue] | Any") -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
