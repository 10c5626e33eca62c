"""Stage spans on every way out: queue in a gateway, prefill, transfer and decode in the workers."""

import asyncio
import logging
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from common.messages.ids import (
    BlockId,
    EntryId,
    Epoch,
    Fingerprint,
    GatewayId,
    ModelName,
    PlacementNumber,
    RequestId,
    TryNumber,
    WorkerId,
)
from common.messages.job import Job, PrefillTask
from common.messages.registry import Role, WorkerRecord
from common.messages.sampling import SamplingParams
from common.runtime.feeds import FeedHub
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.sequence import FinishReason, SequenceKey
from common.telemetry.metrics import WorkerMetrics
from decode_worker.emitter import Emitter
from decode_worker.first_token import FirstToken
from decode_worker.ledger import Ledger, Live
from decode_worker.reception import Attempt, Commit, Reception
from decode_worker.witness import Witness as DecodeWitness
from gateway.engine import GenerateRequest
from gateway.streams import Source, Stream
from prefill_worker.core import Command, SpanReady
from prefill_worker.holdings import Holding, Holdings
from prefill_worker.witness import Witness as PrefillWitness
from proto import worker_pb2 as pb
from tests.support.span_exporter import span_exporter

TRACE = "0123456789abcdef0123456789abcdef"
PARENT = f"00-{TRACE}-0123456789abcdef-01"
STATE = "vendor=state"
REQUEST = RequestId("r-1")
SAMPLING = SamplingParams(seed=1, max_tokens=8)
DECODE = WorkerId("decode-0")
GATEWAY = GatewayId("g")
JOB = Job(
    REQUEST, PlacementNumber(1), GATEWAY, ModelName("m"), 3, SAMPLING, prompt=b"", traceparent=PARENT, tracestate=STATE
)
PREFILL = WorkerRecord(
    WorkerId("prefill-0"), Role.PREFILL, Epoch(7), ModelName("m"), Fingerprint("f"), "127.0.0.1:1", 1, 10, 16, 64, 4
)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return span_exporter(monkeypatch)


def told(exporter: InMemorySpanExporter) -> list[tuple[str, str | None]]:
    """Return names and errors, in order; all spans must belong to the request and its trace."""
    spans: Sequence[ReadableSpan] = exporter.get_finished_spans()
    for span in spans:
        assert span.context is not None
        assert span.parent is not None
        assert (f"{span.context.trace_id:032x}", span.parent.span_id) == (TRACE, 0x0123456789ABCDEF)
        assert span.context.trace_state.to_header() == STATE
        assert (span.attributes or {})["tandem.request.id"] == REQUEST
        assert span.status.is_unset == (span.status.description is None)
    return [(span.name, span.status.description) for span in spans]


class TestQueue:
    """From the start of a placement until a worker has accepted it."""

    @pytest.fixture
    def stream(self) -> Stream:
        request = GenerateRequest(REQUEST, ModelName("m"), [1], SAMPLING, traceparent=PARENT, tracestate=STATE)
        stream = Stream(request, max_failures=3)
        stream.begin_placement()
        return stream

    def accept(self, stream: Stream) -> None:
        event = pb.FeedEvent(request=REQUEST, placement=stream.placement, accepted=pb.Accepted())
        assert stream.take(Source(DECODE, Epoch(1)), event)

    async def test_an_accepted_placement(self, exporter: InMemorySpanExporter, stream: Stream) -> None:
        self.accept(stream)
        self.accept(stream)  # confirmed again when the prompt is there
        stream.leave_queue("cancelled")
        assert told(exporter) == [("queue", None)]
        (span,) = exporter.get_finished_spans()
        assert (span.attributes or {})["tandem.worker"] == DECODE

    async def test_a_placement_that_nobody_accepted(self, exporter: InMemorySpanExporter, stream: Stream) -> None:
        stream.give_up("nobody wants it")
        stream.begin_placement()
        self.accept(stream)
        assert told(exporter) == [("queue", "placement_lost"), ("queue", None)]
        assert [(span.attributes or {})["tandem.placement"] for span in exporter.get_finished_spans()] == [1, 2]

    async def test_a_client_that_leaves_while_queued(self, exporter: InMemorySpanExporter, stream: Stream) -> None:
        stream.leave_queue("cancelled")
        assert told(exporter) == [("queue", "cancelled")]


class TestDecodeWorker:
    """What a decode worker records when a placement is over."""

    @pytest.fixture
    def metrics(self) -> WorkerMetrics:
        return WorkerMetrics(CollectorRegistry())

    @pytest.fixture
    def witness(self, metrics: WorkerMetrics) -> DecodeWitness:
        return DecodeWitness(DECODE, metrics)

    @pytest.fixture
    def ledger(self, witness: DecodeWitness) -> Ledger:
        return Ledger(witness.closed)

    @pytest.fixture
    async def emitter(self, ledger: Ledger) -> Emitter:
        return Emitter(FeedHub(lambda _: None), ledger)

    @pytest.fixture
    def live(self, ledger: Ledger) -> Live:
        return ledger.open(JOB)

    def emission(self, live: Live, index: int, **fields: object) -> Emission:
        return Emission(SequenceKey(*live.key), index, (5,), 0, **fields)  # type: ignore[arg-type]  # fields of its own

    async def test_a_local_prefill_and_its_end(
        self, exporter: InMemorySpanExporter, ledger: Ledger, emitter: Emitter, live: Live
    ) -> None:
        live.prefilling_ns = live.accepted_ns
        emitter.emit(self.emission(live, 0, num_cached=2))
        emitter.emit(self.emission(live, 1, num_cached=2, finish=FinishReason.STOP))
        ledger.close(live.key)
        ledger.close(live.key)
        assert told(exporter) == [("prefill", None), ("decode", None)]
        prefill, decode = exporter.get_finished_spans()
        assert prefill.end_time == decode.start_time
        assert (prefill.attributes or {})["tandem.prefill.cached_tokens"] == 2
        assert (decode.attributes or {})["gen_ai.usage.output_tokens"] == 2

    async def test_cancelled_while_it_is_prefilled(
        self, exporter: InMemorySpanExporter, ledger: Ledger, live: Live
    ) -> None:
        live.prefilling_ns = live.accepted_ns
        ledger.close(live.key)
        assert told(exporter) == [("prefill", "cancelled")]

    async def test_cancelled_while_it_decodes(
        self, exporter: InMemorySpanExporter, ledger: Ledger, emitter: Emitter, live: Live
    ) -> None:
        emitter.emit(self.emission(live, 0))
        ledger.close(live.key)
        assert told(exporter) == [("decode", "cancelled")]

    async def test_nan_in_the_prompt(
        self, exporter: InMemorySpanExporter, ledger: Ledger, emitter: Emitter, live: Live, metrics: WorkerMetrics
    ) -> None:
        live.prefilling_ns = live.accepted_ns
        emitter.emit(Emission(SequenceKey(*live.key), 0, (), 0, failure=FailureCode.INVALID_LOGITS))
        ledger.close(live.key)
        assert told(exporter) == [("prefill", "invalid_logits")]
        assert metrics.registry.get_sample_value("tandem_nan_logits_total") == 1

    async def test_a_worker_that_leaves(
        self, exporter: InMemorySpanExporter, ledger: Ledger, emitter: Emitter, live: Live
    ) -> None:
        emitter.emit(self.emission(live, 0))
        emitter.failed(live, "worker_draining", "the worker is leaving", is_retryable=True)
        ledger.close(live.key)
        assert told(exporter) == [("decode", "worker_draining")]

    async def test_a_try_that_is_lost_and_one_that_is_not(
        self, exporter: InMemorySpanExporter, witness: DecodeWitness, live: Live, metrics: WorkerMetrics
    ) -> None:
        reception = Reception(SequenceKey(*live.key), b"", frozenset(), 0, [BlockId(1), BlockId(2)])
        lost = self.pulling(reception, 1)
        witness.lost_pull()
        witness.lost_try(live, lost, "PeerUnreachable")
        good = self.pulling(reception, 2)
        good.arrive([0, 1])
        prefill_span = f"00-{TRACE}-00000000000000aa-01"
        good.take_commit(Commit(FirstToken(5), prefill_span), is_last=False)
        witness.handed_over(live, good)
        gone = self.pulling(reception, 3)
        witness.cancelled_try(live, gone)
        unpulled = reception.begin(TryNumber(4))
        witness.lost_try(live, unpulled, "AttemptLost")
        assert told(exporter) == [("transfer", "PeerUnreachable"), ("transfer", None), ("transfer", "cancelled")]
        spans = exporter.get_finished_spans()
        assert [[link.context.span_id for link in span.links] for span in spans] == [[], [0xAA], []]
        assert [(span.attributes or {})["tandem.transfer.pages"] for span in spans] == [0, 2, 0]
        counted = {outcome: self.handovers(metrics, outcome) for outcome in ("remote", "retry", "local")}
        assert counted == {"remote": 1, "retry": 2, "local": None}
        assert metrics.registry.get_sample_value("tandem_transfer_failures_total") == 1

    async def test_a_fall_back_is_prefilled_from_then_on(
        self, exporter: InMemorySpanExporter, ledger: Ledger, emitter: Emitter, live: Live, witness: DecodeWitness
    ) -> None:
        before_ns = time.time_ns()
        witness.fell_back(live)
        emitter.emit(self.emission(live, 0, finish=FinishReason.LENGTH))
        ledger.close(live.key)
        assert told(exporter) == [("prefill", None), ("decode", None)]
        assert (exporter.get_finished_spans()[0].start_time or 0) >= before_ns

    async def test_one_line_in_the_log(
        self, caplog: pytest.LogCaptureFixture, ledger: Ledger, emitter: Emitter, live: Live
    ) -> None:
        caplog.set_level(logging.DEBUG)
        for index in range(7):
            emitter.emit(self.emission(live, index))
        emitter.emit(self.emission(live, 7, finish=FinishReason.LENGTH))
        ledger.close(live.key)
        (record,) = caplog.records
        fields = record.__dict__
        assert (record.levelname, record.message) == ("INFO", "request ended")
        assert (fields["request_id"], fields["outcome"], fields["num_tokens"]) == (REQUEST, "length", 8)

    def pulling(self, reception: Reception, number: int) -> Attempt:
        attempt = reception.begin(TryNumber(number))
        assert attempt.bind(PREFILL)
        attempt.first_pull_ns = time.time_ns()
        return attempt

    def handovers(self, metrics: WorkerMetrics, outcome: str) -> float | None:
        return metrics.registry.get_sample_value("tandem_handovers_total", {"outcome": outcome})


class TestPrefillWorker:
    """What a prefill worker records when a prompt is done, and when its binding is over."""

    @pytest.fixture
    def metrics(self) -> WorkerMetrics:
        return WorkerMetrics(CollectorRegistry())

    @pytest.fixture
    def witness(self, metrics: WorkerMetrics) -> PrefillWitness:
        return PrefillWitness(PREFILL.worker, metrics)

    @pytest.fixture
    def holdings(self, witness: PrefillWitness) -> Holdings:
        released: list[Command] = []
        return Holdings(released.append, witness.ended)

    @pytest.fixture
    def holding(self, holdings: Holdings) -> Holding:
        task = PrefillTask(
            *(REQUEST, PlacementNumber(1), TryNumber(1), DECODE, Epoch(1), GATEWAY, 40, 40, SAMPLING),
            traceparent=PARENT,
            tracestate=STATE,
        )
        holding = Holding(task, EntryId("1-0"), PREFILL, range(3), (), 1.0, expires_at=time.monotonic() + 60)
        with holdings.binding(holding.key):
            assert holdings.add(holding)
        return holding

    async def test_a_prompt_that_is_done_and_released(
        self, exporter: InMemorySpanExporter, holdings: Holdings, holding: Holding, witness: PrefillWitness
    ) -> None:
        traceparent = witness.prefilled(holding, SpanReady(holding.sequence, (), 5, 16, None))
        holdings.end(holding.key)
        assert told(exporter) == [("prefill", None)]
        (span,) = exporter.get_finished_spans()
        assert span.context is not None
        assert traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert (span.attributes or {})["tandem.prefill.cached_tokens"] == 16

    @pytest.mark.parametrize(
        ("failure", "error", "num_nan"),
        [("invalid_logits", "invalid_logits", 1), ("40 tokens exceed the 16 of this worker", "does_not_fit", 0)],
    )
    async def test_a_prompt_that_fails(
        self,
        exporter: InMemorySpanExporter,
        holdings: Holdings,
        holding: Holding,
        witness: PrefillWitness,
        metrics: WorkerMetrics,
        failure: str,
        error: str,
        num_nan: int,
    ) -> None:
        witness.failed(holding, failure)
        holdings.end(holding.key)
        assert told(exporter) == [("prefill", error)]
        assert metrics.registry.get_sample_value("tandem_nan_logits_total") == num_nan

    async def test_a_prompt_that_is_cancelled(
        self, exporter: InMemorySpanExporter, holdings: Holdings, holding: Holding
    ) -> None:
        holdings.end(holding.key)
        holdings.end(holding.key)
        assert told(exporter) == [("prefill", "cancelled")]

    @pytest.mark.parametrize("is_done", [True, False])
    async def test_a_lease_that_is_over(
        self,
        exporter: InMemorySpanExporter,
        holdings: Holdings,
        holding: Holding,
        witness: PrefillWitness,
        metrics: WorkerMetrics,
        *,
        is_done: bool,
    ) -> None:
        if is_done:
            witness.prefilled(holding, SpanReady(holding.sequence, (), 5, 0, None))
        holding.expires_at = 0.0
        assert holdings.reap() == [holding]
        assert told(exporter) == [("prefill", None if is_done else "lease_expired")]
        assert metrics.registry.get_sample_value("tandem_handovers_total", {"outcome": "lease_expired"}) == 1


async def test_b125_fifty_requests_side_by_side(exporter: InMemorySpanExporter) -> None:
    witness = DecodeWitness(DECODE, WorkerMetrics(CollectorRegistry()))
    ledger = Ledger(witness.closed)
    emitter = Emitter(FeedHub(lambda _: None), ledger)

    async def serve(number: int) -> None:
        parent = f"00-{number:032x}-{number:016x}-01" if number % 3 else ""
        job = Job(RequestId(str(number)), PlacementNumber(1), GATEWAY, ModelName("m"), 1, SAMPLING, traceparent=parent)
        live = ledger.open(job)
        live.prefilling_ns = live.accepted_ns
        await asyncio.sleep(0)
        emitter.emit(Emission(SequenceKey(*live.key), 0, (5,), 0))
        await asyncio.sleep(0)
        ledger.close(live.key)

    await asyncio.gather(*(serve(number) for number in range(1, 51)))
    spans = exporter.get_finished_spans()
    assert len(spans) == 100
    for span in spans:
        number = int(str((span.attributes or {})["tandem.request.id"]))
        assert span.context is not None
        assert (span.context.trace_id == number) == bool(number % 3)
        assert (span.parent is None) == (number % 3 == 0)
