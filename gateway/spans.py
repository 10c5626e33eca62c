"""The spans of one request in this process: the SERVER span and its stages."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from common.messages.ids import RequestId
from common.messages.sampling import SamplingParams
from common.telemetry.traces import Attribute, Stage, end_span, extract, inject, start_span
from gateway.text_stream import TextEnd

PROVIDER = "tandem"


class RequestSpan:
    """The SERVER span. Its owner calls `end` on every way out."""

    def __init__(self, request: RequestId, route: str, headers: Mapping[str, str]) -> None:
        """Continue the caller's trace if `headers` name one, else begin one."""
        self._span: Span = start_span(
            f"POST {route}",
            extract(headers.get("traceparent", ""), headers.get("tracestate", "")),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route, "tandem.request.id": request},
        )

    @property
    def traceparent(self) -> str:
        """What makes other processes' spans children of this one."""
        return inject(self._span)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Record what the block does as a child."""
        span = start_span(stage, self._context)
        error = "cancelled"
        try:
            yield
            error = ""
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            end_span(span, error=error)

    def asked(self, operation: str, model: str, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Note what is generated."""
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
            }
        )

    def answered(self, end: TextEnd) -> None:
        """Note how the answer ended."""
        self._span.set_attributes(
            {
                Attribute.FINISH_REASONS: [end.finish_reason],
                Attribute.OUTPUT_TOKENS: end.num_tokens,
            }
        )

    def end(self, status: int, error: str = "") -> None:
        """End the span; `error` is a code of ours."""
        self._span.set_attribute("http.response.status_code", status)
        end_span(self._span, error=error)

    @property
    def _context(self) -> Context:
        return set_span_in_context(self._span, Context())
