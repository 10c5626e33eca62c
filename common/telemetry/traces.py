"""One OpenTelemetry trace per request, over all processes.

A request's spans never come from an ambient context: each names its parent by the `traceparent` that travels with the
request, because its stages run in several processes and threads while others run beside it. All stages are children of
the gateway's SERVER span. Attribute names follow the HTTP, RPC and GenAI semantic conventions 1.37.0, ours begin with
`tandem.`. Prompts and outputs are never recorded.
"""

import enum
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
_EXPORT_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_MS = 3_000
_MAX_TRACESTATE_CHARS = 512
"""What W3C Trace Context asks to be passed on; a job in Redis stays small."""

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("tandem", schema_url=SCHEMA_URL)
"""Of the provider that `setup_tracing` sets, now or later."""


class Stage(enum.StrEnum):
    """Span names: the states of a request's life."""

    ADMIT = "admit"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class Attribute:
    """Names of span attributes (constants)."""

    METHOD = "http.request.method"
    ROUTE = "http.route"
    STATUS = "http.response.status_code"
    PATH = "url.path"
    SCHEME = "url.scheme"
    RPC_SYSTEM = "rpc.system"
    RPC_SERVICE = "rpc.service"
    RPC_METHOD = "rpc.method"
    RPC_STATUS = "rpc.grpc.status_code"
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
    REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
    REQUEST_SEED = "gen_ai.request.seed"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    ERROR_TYPE = "error.type"
    REQUEST_ID = "tandem.request.id"
    PLACEMENT = "tandem.placement"
    WORKER = "tandem.worker"
    CACHED_TOKENS = "tandem.prefill.cached_tokens"
    PREFILL_PLACE = "tandem.prefill.place"
    PREFILL_REASON = "tandem.prefill.reason"
    PREFILL_LOCAL_S = "tandem.prefill.expected_local_s"
    PREFILL_REMOTE_S = "tandem.prefill.expected_remote_s"
    PAGES = "tandem.transfer.pages"
    SOURCE = "tandem.transfer.source"


def setup_tracing(service: str, endpoint: str | None, instance: str) -> None:
    """Export the spans of this process to an OTLP gRPC collector ("http://host:4317"); once per process.

    `service` says what it is ("decode-worker"), `instance` which one ("decode-0"). Without an endpoint spans record
    nothing and cost next to nothing, but a caller's `traceparent` is still passed on.
    """
    if endpoint is None:
        return
    identity = {"service.namespace": "tandem", "service.name": service, "service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(identity))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def flush_tracing() -> None:
    """Export what is left, for at most three seconds; blocks, so call it in a thread or at the very end."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(_FLUSH_TIMEOUT_MS)


def inject(span: Span) -> str:
    """Return the `traceparent` that names `span` as a parent, "" if nothing traces it."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def inject_state(span: Span) -> str:
    """Return the `tracestate` that goes with `inject`, "" if there is none; too long a one loses its oldest entries."""
    state = span.get_span_context().trace_state
    while len(header := state.to_header()) > _MAX_TRACESTATE_CHARS:
        state = state.delete(list(state.keys())[-1])
    return header


def extract(traceparent: str, tracestate: str = "") -> Context:
    """Return the context that a `traceparent` names; malformed or "" gives an empty one: a new trace begins there.

    A caller who did not sample (flags 00) is respected: nothing of that trace is recorded.
    """
    if not traceparent:
        return Context()
    return _propagator.extract({"traceparent": traceparent, "tracestate": tracestate}, context=Context())


def start_span(
    name: str,
    parent: Context,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Span:
    """Return a started span; its owner calls `end_span` on every way out."""
    return _tracer.start_span(name, context=parent, kind=kind, attributes=attributes)


def end_span(span: Span, *, error: str = "", end_ns: int | None = None) -> None:
    """End the span; `error` (a type or code, no text of a client's) gives it an error status."""
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
        span.set_attribute(Attribute.ERROR_TYPE, error)
    span.end(end_time=end_ns)


def record_span(
    name: str,
    parent: Context,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, AttributeValue] | None = None,
    links: Sequence[str] = (),
    *,
    error: str = "",
) -> str:
    """Record a stage that is over; return its own `traceparent`, for links to it.

    Times are nanoseconds since 1970 (`time.time_ns`). `links` holds `traceparent`s of related spans.
    """
    span = _tracer.start_span(
        name,
        context=parent,
        attributes=attributes,
        links=[Link(context) for link in links if (context := _span_context(link)).is_valid],
        start_time=start_ns,
    )
    end_span(span, error=error, end_ns=max(start_ns, end_ns))
    return inject(span)


def _span_context(traceparent: str) -> SpanContext:
    return trace.get_current_span(extract(traceparent)).get_span_context()
