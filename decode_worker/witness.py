"""What a decode worker tells about its requests: stage spans, counts, and one line in the log for each.

Owned by the event loop. Spans are recorded when a stage is over, so nothing has to be closed on the ways out.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from opentelemetry.util.types import AttributeValue

from common.errors import PageCorrupt
from common.messages.ids import WorkerId
from common.runtime.standing import Tallies
from common.scheduling.emission import FailureCode
from common.scheduling.sequence import SequenceKey
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.traces import Attribute, Stage, extract, record_span
from common.transfer.puller import PullReport
from decode_worker.ledger import CANCELLED, Live
from decode_worker.placing import Decision, Place
from decode_worker.reception import Attempt

logger = logging.getLogger(__name__)


class Witness:
    """Hears of every end: of a placement, of a try to have it prefilled elsewhere, of a pull."""

    def __init__(self, worker: WorkerId, metrics: WorkerMetrics) -> None:
        self._worker = worker
        self._metrics = metrics
        self._num_placements = 0
        self._num_failovers = 0
        self._num_tries = 0
        self._num_stale = 0

    def tallies(self, num_bindings: int) -> Tallies:
        """Return what was counted so far, for heartbeat and metrics."""
        return Tallies(num_bindings, self._num_placements, self._num_failovers, self._num_tries, self._num_stale)

    def placed(self, live: Live) -> None:
        """A placement was taken in; all but the first one of a request continue a lost one."""
        self._num_placements += 1
        self._num_failovers += live.job.placement > 1

    def tried(self) -> None:
        """A task is published."""
        self._num_tries += 1

    def closed(self, live: Live) -> None:
        """A placement is over: record its stages here."""
        now_ns = time.time_ns()
        if live.failure == FailureCode.INVALID_LOGITS:
            self._metrics.nan_logits.inc()
        if live.prefilling_ns is not None:
            self._record_prefill(live, live.prefilling_ns, live.decoding_ns or now_ns)
        if live.decoding_ns is not None:
            attributes = {Attribute.OUTPUT_TOKENS: live.num_generated, **_of_decision(live.decision)}
            self._record(Stage.DECODE, live, live.decoding_ns, now_ns, attributes, error=live.failure)
        logger.info(
            "request ended",
            extra={
                "request_id": live.job.request,
                "placement": live.job.placement,
                "outcome": live.failure or str(live.finish),
                "num_prompt_tokens": live.job.num_prompt_tokens,
                "num_cached_tokens": live.num_cached,
                "num_tokens": live.num_generated,
                "duration_s": round((now_ns - live.accepted_ns) / 1e9, 6),
            },
        )

    def handed_over(self, live: Live, attempt: Attempt) -> None:
        """A try has brought the first token and all pages that are wanted."""
        live.stages.transfer_s = attempt.transfer_s
        self._metrics.note_handover("remote")
        self._record_transfer(live, attempt, error="")

    def lost_try(self, live: Live, attempt: Attempt, error: str) -> None:
        """A try is over and the prompt is still not here."""
        self._metrics.note_handover("retry")
        self._record_transfer(live, attempt, error)

    def cancelled_try(self, live: Live, attempt: Attempt) -> None:
        """The request went away while it was received."""
        self._record_transfer(live, attempt, CANCELLED)

    def fell_back(self, live: Live) -> None:
        """Nobody else will prefill the prompt: it is computed here from now on."""
        self._metrics.note_handover("local")
        live.prefilling_ns = time.time_ns()

    def decided(self, live: Live, decision: Decision) -> None:
        """It is known where the prompt is computed; another choice may have it decided again."""
        live.decision = decision
        self._metrics.note_decision(decision.place, decision.reason)

    def prefilled(self, live: Live) -> float | None:
        """The first token is there. Return how long it took since the prefill began, in seconds, if it ended where it
        was meant to."""
        decision, begun_s = live.decision, live.stages.begun_s
        is_here = live.prefilling_ns is not None
        if decision is None or begun_s is None or is_here is not (decision.place is Place.HERE):
            return None
        duration_s = time.monotonic() - begun_s
        if decision.expected_s is not None:
            self._metrics.note_prefill(decision.place, decision.expected_s, duration_s)
        return duration_s

    def pulled(self, report: PullReport) -> None:
        """Pages have come."""
        self._metrics.note_pull(report.transport, report.num_bytes, report.duration_s)

    def lost_pull(self) -> None:
        """Pages could not be pulled."""
        self._metrics.transfer_failures.inc()

    def found_corrupt(self, key: SequenceKey, error: PageCorrupt) -> None:
        """Pages have come with other bytes than they were announced with."""
        self._metrics.corrupt_pages.inc()
        logger.error("corrupt: %s", error, extra={"request_id": key.request})

    def ignored(self) -> None:
        """A message named a placement or a try that is over."""
        self._num_stale += 1

    def _record_prefill(self, live: Live, start_ns: int, end_ns: int) -> None:
        attributes = {Attribute.INPUT_TOKENS: live.job.num_prompt_tokens, Attribute.CACHED_TOKENS: live.num_cached}
        error = "" if live.decoding_ns is not None else live.failure
        self._record(Stage.PREFILL, live, start_ns, end_ns, attributes, error=error)

    def _record_transfer(self, live: Live, attempt: Attempt, error: str) -> None:
        """Record from the first pull on; a try that never pulled has no transfer."""
        if attempt.first_pull_ns is None or attempt.source is None:
            return
        attributes: dict[str, AttributeValue] = {
            Attribute.PAGES: len(attempt.arrived),
            Attribute.SOURCE: attempt.source.worker,
        }
        prefill = [attempt.commit.traceparent] if attempt.commit is not None else []
        now_ns = time.time_ns()
        self._record(Stage.TRANSFER, live, attempt.first_pull_ns, now_ns, attributes, links=prefill, error=error)

    def _record(
        self,
        stage: Stage,
        live: Live,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue],
        *,
        links: Sequence[str] = (),
        error: str,
    ) -> None:
        common: dict[str, AttributeValue] = {
            Attribute.REQUEST_ID: live.job.request,
            Attribute.PLACEMENT: live.job.placement,
            Attribute.WORKER: self._worker,
        }
        parent = extract(live.job.traceparent, live.job.tracestate)
        record_span(stage, parent, start_ns, end_ns, {**common, **attributes}, links, error=error)


def _of_decision(decision: Decision | None) -> dict[str, AttributeValue]:
    """Return what a span tells about where the prompt was to be computed; seconds only where they were expected."""
    if decision is None:
        return {}
    prices = {Attribute.PREFILL_LOCAL_S: decision.here, Attribute.PREFILL_REMOTE_S: decision.there}
    return {
        Attribute.PREFILL_PLACE: str(decision.place),
        Attribute.PREFILL_REASON: str(decision.reason),
        **{name: round(price.first_token_s, 6) for name, price in prices.items() if price is not None},
    }
