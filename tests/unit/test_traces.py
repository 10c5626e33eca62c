"""Spans of one request form one trace, and never join another's."""

import asyncio
import re
import socket
import time

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.telemetry import traces
from common.telemetry.traces import Attribute, Stage, end_span, extract, inject, inject_state, record_span, start_span
from tests.support.span_exporter import span_exporter

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"
MALFORMED = [
    "",
    "garbage",
    f"00-{TRACE}-b7ad6b7169203331",
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-b7ad6b7169203331-01",
    f"00-{TRACE.upper()}X-b7ad6b7169203331-01",
    "00-" + "é" * 32 + "-b7ad6b7169203331-01",
    "00-" * 10_000,
]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return span_exporter(monkeypatch)


def hex_trace(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def test_stages_are_children_of_the_server_span_in_the_caller_s_trace(exporter: InMemorySpanExporter) -> None:
    server = start_span("chat", extract(PARENT), kind=SpanKind.SERVER, attributes={Attribute.OPERATION: "chat"})
    prefill = record_span(Stage.PREFILL, extract(inject(server)), 1_000, 2_000)
    record_span(Stage.TRANSFER, extract(inject(server)), 2_000, 3_000, {"tandem.transfer.pages": 4}, links=[prefill])
    end_span(server)
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    assert {hex_trace(span) for span in by_name.values()} == {TRACE}
    assert by_name["chat"].kind is SpanKind.SERVER
    assert by_name["chat"].parent is not None
    assert by_name["chat"].parent.span_id == 0xB7AD6B7169203331
    for name in ("prefill", "transfer"):
        parent = by_name[name].parent
        assert parent is not None
        assert parent.span_id == server.get_span_context().span_id
    (link,) = by_name["transfer"].links
    assert link.context.span_id == int(prefill.split("-")[2], 16)
    assert (by_name["transfer"].start_time, by_name["transfer"].end_time) == (2_000, 3_000)
    assert by_name["transfer"].attributes == {"tandem.transfer.pages": 4}


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_parent_begins_a_new_trace(exporter: InMemorySpanExporter, malformed: str) -> None:
    span = start_span("chat", extract(malformed))
    end_span(span)
    record_span(Stage.QUEUE, extract(inject(span)), 1, 2, links=[malformed])
    server, queue = exporter.get_finished_spans()
    assert server.parent is None
    assert hex_trace(server) == hex_trace(queue) != TRACE
    assert queue.links == ()


def test_a_parent_of_a_later_version_is_understood(exporter: InMemorySpanExporter) -> None:
    end_span(start_span("chat", extract(f"01-{TRACE}-b7ad6b7169203331-01-extra")))
    assert hex_trace(exporter.get_finished_spans()[0]) == TRACE


def test_a_caller_who_does_not_sample_is_respected(exporter: InMemorySpanExporter) -> None:
    server = start_span("chat", extract(UNSAMPLED))
    stage = record_span(Stage.DECODE, extract(inject(server)), 1, 2)
    end_span(server)
    assert exporter.get_finished_spans() == ()
    for traceparent in (inject(server), stage):
        assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-00", traceparent)


def test_tracestate_is_kept(exporter: InMemorySpanExporter) -> None:
    span = start_span("chat", extract(PARENT, "vendor=value"))
    assert span.get_span_context().trace_state.get("vendor") == "value"
    assert inject_state(span) == "vendor=value"
    record_span(Stage.DECODE, extract(inject(span), inject_state(span)), 1, 2)
    (decode,) = exporter.get_finished_spans()
    assert decode.context is not None
    assert decode.context.trace_state.get("vendor") == "value"


def test_a_long_tracestate_keeps_its_newest_entries(exporter: InMemorySpanExporter) -> None:
    entries = [f"vendor{number}={'v' * 200}" for number in range(20)]
    assert inject_state(start_span("chat", extract(PARENT, ",".join(entries)))) == ",".join(entries[:2])
    assert inject_state(start_span("chat", extract(PARENT))) == ""


async def test_interleaved_requests_never_share_a_trace(exporter: InMemorySpanExporter) -> None:
    async def serve(number: int) -> None:
        parent = f"00-{number + 1:032x}-{number + 1:016x}-01" if number % 2 else ""
        server = start_span(f"chat {number}", extract(parent))
        with trace.use_span(server):  # an ambient span of somebody else must not matter
            await asyncio.sleep(0)
            record_span(f"stage {number}", extract(inject(server)), 1, 2)
        await asyncio.sleep(0)
        end_span(server, error="aborted" if number % 5 == 0 else "")

    await asyncio.gather(*(serve(number) for number in range(50)))
    found: dict[str, set[str]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name.split()[1], set()).add(hex_trace(span))
    assert all(len(ids) == 1 for ids in found.values())
    assert len({next(iter(ids)) for ids in found.values()}) == 50
    assert all(found[str(number)] == {f"{number + 1:032x}"} for number in range(1, 50, 2))


def test_an_error_gives_the_span_an_error_status(exporter: InMemorySpanExporter) -> None:
    end_span(start_span("chat", Context()), error="WorkerLost")
    record_span(Stage.PREFILL, extract(PARENT), 1, 2, error="invalid_logits")
    record_span(Stage.PREFILL, extract(PARENT), 1, 2)
    failed, recorded, good = exporter.get_finished_spans()
    assert [span.status.status_code for span in (failed, recorded)] == [StatusCode.ERROR] * 2
    assert good.status.status_code is StatusCode.UNSET
    assert failed.attributes == {Attribute.ERROR_TYPE: "WorkerLost"}


def test_a_span_never_ends_before_it_starts(exporter: InMemorySpanExporter) -> None:
    record_span(Stage.QUEUE, extract(PARENT), 10, 9)
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (10, 10)


def test_without_an_endpoint_the_caller_s_parent_is_passed_on() -> None:
    traces.setup_tracing("gateway", None, "gateway-0")
    span = start_span("chat", extract(PARENT))
    assert not span.is_recording()
    assert inject(span) == PARENT
    assert record_span(Stage.QUEUE, extract(PARENT), 1, 2) == PARENT
    assert inject(start_span("chat", extract(""))) == ""


def test_a_collector_that_is_away_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    providers: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", providers.append)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: providers[0])
    traces.setup_tracing("gateway", f"http://127.0.0.1:{port}", "gateway-0")
    started = time.monotonic()
    for _ in range(1000):
        providers[0].get_tracer("test").start_span("chat").end()
    assert time.monotonic() - started < 1.0
    traces.flush_tracing()
    providers[0].shutdown()
    assert time.monotonic() - started < 10.0
