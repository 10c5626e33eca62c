"""Spans of a request: one trace, one SERVER span, its stages below, and the way on to the workers."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import WorkerLost
from tests.support.gateway_server import Gateway, chat_body, raw_request, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop
from tests.support.span_exporter import span_exporter
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
TRACE = "0123456789abcdef0123456789abcdef"


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with running_gateway(engine) as running:
        yield running


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return span_exporter(monkeypatch)


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


async def test_b124_one_trace_from_the_caller_on(gateway: Gateway, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-0123456789abcdef-01"}
    await gateway.post(CHAT, chat_body(temperature=0.5, seed=7, max_tokens=9), headers=headers)
    spans = by_name(exporter.get_finished_spans())
    server = spans[f"POST {CHAT}"]
    assert set(spans) == {server.name, "admit", "tokenize"}
    assert {trace_of(span) for span in spans.values()} == {TRACE}
    assert server.kind is trace.SpanKind.SERVER
    assert server.context is not None
    assert all(span.parent is not None for span in spans.values())
    assert {spans[name].parent.span_id for name in ("admit", "tokenize")} == {server.context.span_id}  # type: ignore[union-attr]  # checked
    assert gateway.engine.requests[0].traceparent == f"00-{TRACE}-{server.context.span_id:016x}-01"
    attributes = dict(server.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "tiny"
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.model"] == "tiny"
    assert str(attributes["gen_ai.response.id"]).startswith("chatcmpl-")
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["http.response.status_code"] == 200


async def test_b124_tracestate_is_passed_on(gateway: Gateway, exporter: InMemorySpanExporter) -> None:
    headers = [
        f"traceparent: 00-{TRACE}-0123456789abcdef-01",
        "TraceState: a=1",
        "tracestate: b=2",
        "Connection: close",
    ]
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(), *headers))
        assert b" 200 " in await reader.readline()
        await reader.read()
    assert gateway.engine.requests[0].tracestate == "a=1,b=2"


async def test_an_unknown_path_is_not_part_of_a_name(gateway: Gateway, exporter: InMemorySpanExporter) -> None:
    await gateway.post("/v1/secret-path", {})
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST"
    attributes = dict(span.attributes or {})
    assert "http.route" not in attributes
    assert attributes["http.response.status_code"] == 404
    assert span.status.is_unset


async def test_a_refusal_is_an_error_of_its_stage_not_of_the_server(
    gateway: Gateway, exporter: InMemorySpanExporter
) -> None:
    assert (await gateway.post("/v1/completions", {"model": "tiny", "prompt": [10**6]}))[0] == 400
    spans = by_name(exporter.get_finished_spans())
    assert spans["tokenize"].status.description == "InvalidRequest"
    assert spans["POST /v1/completions"].status.is_unset


@pytest.mark.parametrize("traceparent", [None, "nonsense", "00-" + "0" * 32 + "-0123456789abcdef-01"])
async def test_b124_without_a_usable_parent_a_trace_begins(
    gateway: Gateway, exporter: InMemorySpanExporter, traceparent: str | None
) -> None:
    await gateway.post(CHAT, chat_body(), headers={"traceparent": traceparent} if traceparent else {})
    spans = exporter.get_finished_spans()
    assert len({trace_of(span) for span in spans}) == 1
    assert by_name(spans)[f"POST {CHAT}"].parent is None


async def test_b125_interleaved_requests_keep_to_their_own_traces(
    gateway: Gateway, exporter: InMemorySpanExporter
) -> None:
    traces = [f"{number:032x}" for number in range(1, 21)]
    await asyncio.gather(
        *(gateway.post(CHAT, chat_body(), headers={"TraceParent": f"00-{name}-0123456789abcdef-01"}) for name in traces)
    )
    spans = exporter.get_finished_spans()
    assert sorted(trace_of(span) for span in spans) == sorted(traces * 3)


async def test_b125_failed_and_aborted_requests_end_their_spans(
    gateway: Gateway, exporter: InMemorySpanExporter
) -> None:
    gateway.engine.play([1, WorkerLost("gone")], [Silence()])
    await gateway.events(CHAT, chat_body(stream=True))
    async with gateway.connection() as (_, writer):
        writer.write(raw_request(CHAT, chat_body()))
        await gateway.engine.until_running(1)
        writer.transport.abort()
        await gateway.engine.until_running(0)
    servers = [span for span in exporter.get_finished_spans() if span.kind is trace.SpanKind.SERVER]
    assert [span.status.description for span in servers] == ["worker_lost", "aborted"]
