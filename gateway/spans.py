"""The spans of one request in this process: the SERVER span, and its stages until a worker has accepted it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from common.messages.ids import PlacementNumber, RequestId, WorkerId
from common.messages.sampling import SamplingParams
from common.telemetry.traces import Attribute, Stage, end_span, extract, inject, inject_state, start_span
from gateway.engine import FinishReason, GenerateRequest
from gateway.schemas.usage import Usage

PROVIDER = "tandem"

CANCELLED = "cancelled"
"""The error of a stage that its request did not outlive."""

_UNRECORDED = nullcontext()


class RequestSpan:
    """The SERVER span. Its owner calls `end` on every way out. `status` names the attribute of the answer's status."""

    def __init__(
        self,
        request: RequestId,
        name: str,
        parent: Context,
        attributes: Mapping[str, AttributeValue],
        *,
        status: str,
    ) -> None:
        """Continue the caller's trace if `parent` names one, else begin one."""
        self._request = request
        self._status = status
        attributes = {Attribute.REQUEST_ID: request, **attributes}
        self._span: Span = start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)

    @property
    def traceparent(self) -> str:
        """What makes other processes' spans children of this one."""
        return inject(self._span)

    @property
    def tracestate(self) -> str:
        """What travels beside `traceparent`."""
        return inject_state(self._span)

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Record what the block does as a child."""
        return self._recorded(stage) if self._span.is_recording() else _UNRECORDED

    @contextmanager
    def _recorded(self, stage: Stage) -> Iterator[None]:
        span = start_span(stage, self._context, attributes={Attribute.REQUEST_ID: self._request})
        error = CANCELLED
        try:
            yield
            error = ""
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            end_span(span, error=error)

    def asked(self, operation: str, model: str, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Note what is generated. Stop strings are left out: they are a client's text."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                Attribute.OPERATION: operation,
                Attribute.PROVIDER: PROVIDER,
                Attribute.REQUEST_MODEL: model,
                Attribute.REQUEST_MAX_TOKENS: sampling.max_tokens,
                Attribute.REQUEST_TEMPERATURE: sampling.temperature,
                Attribute.REQUEST_TOP_P: sampling.top_p,
                Attribute.REQUEST_SEED: sampling.seed,
                Attribute.INPUT_TOKENS: num_prompt_tokens,
                **_optional(sampling),
            }
        )

    def answered(self, response_id: str, model: str, reasons: Sequence[FinishReason], usage: Usage) -> None:
        """Note how the choices ended, in their order, and what was counted."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                Attribute.RESPONSE_ID: response_id,
                Attribute.RESPONSE_MODEL: model,
                Attribute.FINISH_REASONS: list(reasons),
                Attribute.OUTPUT_TOKENS: usage.completion_tokens,
                Attribute.CACHED_TOKENS: usage.prompt_tokens_details.cached_tokens,
            }
        )

    def end(self, status: int, error: str = "") -> None:
        """End the span; `error` is a code of ours."""
        if self._span.is_recording():
            self._span.set_attribute(self._status, status)
            end_span(self._span, error=error)

    @property
    def _context(self) -> Context:
        return set_span_in_context(self._span, Context())


def http_span(request: RequestId, http: web.Request, route: str) -> RequestSpan:
    """Return the span of an HTTP request; `route` is "" for an unknown path."""
    attributes = {Attribute.METHOD: http.method, Attribute.PATH: http.path, Attribute.SCHEME: http.scheme}
    if route:
        attributes[Attribute.ROUTE] = route
    return RequestSpan(
        request,
        f"{http.method} {route}".rstrip(),
        extract(http.headers.get("traceparent", ""), ",".join(http.headers.getall("tracestate", ()))),
        attributes,
        status=Attribute.STATUS,
    )


def rpc_span(request: RequestId, service: str, method: str, traceparent: str, tracestate: str) -> RequestSpan:
    """Return the span of a gRPC call."""
    attributes = {Attribute.RPC_SYSTEM: "grpc", Attribute.RPC_SERVICE: service, Attribute.RPC_METHOD: method}
    parent = extract(traceparent, tracestate)
    return RequestSpan(request, f"{service}/{method}", parent, attributes, status=Attribute.RPC_STATUS)


class QueueSpan:
    """From the start of a placement until a worker accepts it. Its owner calls `end` on every way out; idempotent."""

    def __init__(self, request: GenerateRequest, placement: PlacementNumber) -> None:
        self._span: Span | None = start_span(
            Stage.QUEUE,
            extract(request.traceparent, request.tracestate),
            attributes={Attribute.REQUEST_ID: request.request, Attribute.PLACEMENT: placement},
        )

    def accept(self, worker: WorkerId) -> None:
        """End it well: that worker has the request now."""
        if self._span is not None:
            self._span.set_attribute(Attribute.WORKER, worker)
            self.end("")

    def end(self, error: str) -> None:
        """End it; nothing happens if it has ended already."""
        span, self._span = self._span, None
        if span is not None:
            end_span(span, error=error)


def _optional(sampling: SamplingParams) -> Mapping[str, float]:
    """Return the parameters that are off unless a client asks for them."""
    values = {
        Attribute.REQUEST_TOP_K: float(sampling.top_k),
        Attribute.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        Attribute.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    return {name: value for name, value in values.items() if value}
