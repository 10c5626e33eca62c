"""What a prefill worker tells about its bindings: prefill spans, counters, and one line in the log for each.

Owned by the event loop.
"""

import logging
import time

from opentelemetry.util.types import AttributeValue

from common.messages.ids import WorkerId
from common.scheduling.emission import FailureCode
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.traces import Attribute, Stage, extract, record_span
from prefill_worker.core import SpanReady
from prefill_worker.holdings import Holding, Outcome

logger = logging.getLogger(__name__)


class Witness:
    """Hears when a prompt is computed, and when a binding ends."""

    def __init__(self, worker: WorkerId, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._metrics = metrics

    def prefilled(self, holding: Holding, span: SpanReady) -> str:
        """The first token is there; return the `traceparent` of the prefill's span."""
        holding.outcome = Outcome.PREFILLED
        return self._record(holding, span.num_cached, error="")

    def failed(self, holding: Holding, failure: str) -> None:
        """The prompt cannot be computed here."""
        holding.outcome = Outcome.FAILED
        if failure == FailureCode.INVALID_LOGITS:
            self._metrics.nan_logits.inc()
        self._record(holding, 0, error=failure if failure in set(FailureCode) else "does_not_fit")

    def ended(self, holding: Holding) -> None:
        """The binding is over."""
        if not holding.is_recorded:
            self._record(holding, 0, error=holding.outcome)
        if holding.outcome is Outcome.LEASE_EXPIRED:
            self._metrics.note_handover(holding.outcome)
        logger.info(
            "prefill ended",
            extra={
                "request_id": holding.task.request,
                "placement": holding.task.placement,
                "try": holding.task.try_number,
                "outcome": str(holding.outcome),
                "num_tokens": holding.task.num_tokens,
                "duration_s": round((time.time_ns() - holding.claimed_ns) / 1e9, 6),
            },
        )

    def _record(self, holding: Holding, num_cached: int, *, error: str) -> str:
        holding.is_recorded = True
        task = holding.task
        attributes: dict[str, AttributeValue] = {
            Attribute.REQUEST_ID: task.request,
            Attribute.PLACEMENT: task.placement,
            Attribute.WORKER: self._worker,
            Attribute.INPUT_TOKENS: task.num_tokens,
            Attribute.CACHED_TOKENS: num_cached,
        }
        parent = extract(task.traceparent, task.tracestate)
        return record_span(Stage.PREFILL, parent, holding.claimed_ns, time.time_ns(), attributes, error=error)
