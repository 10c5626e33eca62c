"""What calls leave behind: spans in the caller's trace, counts, and one line in the log with the request's id."""

import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import WorkerLost
from proto.tandem.v1 import generate_pb2 as pb
from tests.support.rpc_gateway import RpcGateway, running_rpc_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.span_exporter import span_exporter
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
TRACE = "0123456789abcdef0123456789abcdef"
REQUEST = pb.GenerateRequest(model="tiny", text="hello", sampling=pb.Sampling(seed=7, max_tokens=9))
METHOD = "tandem.v1.Generation/Generate"


@pytest.fixture
async def gateway() -> AsyncIterator[RpcGateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with running_rpc_gateway(engine) as running:
        yield running


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    return span_exporter(monkeypatch)


def sample(gateway: RpcGateway, name: str, **labels: str) -> float:
    return gateway.service.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_call_is_a_span_of_its_callers_trace(gateway: RpcGateway, exporter: InMemorySpanExporter) -> None:
    metadata = (("traceparent", f"00-{TRACE}-0123456789abcdef-01"), ("tracestate", "a=1"), ("tracestate", "b=2"))
    answer = await gateway.generate(REQUEST, metadata=metadata)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {METHOD, "admit", "tokenize"}
    server = spans[METHOD]
    assert server.context is not None
    assert server.kind is trace.SpanKind.SERVER
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context is not None} == {TRACE}
    (request,) = gateway.engine.requests
    assert request.traceparent == f"00-{TRACE}-{server.context.span_id:016x}-01"
    assert request.tracestate == "a=1,b=2"
    attributes = dict(server.attributes or {})
    assert attributes["rpc.system"] == "grpc"
    assert (attributes["rpc.service"], attributes["rpc.method"]) == ("tandem.v1.Generation", "Generate")
    assert attributes["rpc.grpc.status_code"] == 0
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.id"] == attributes["tandem.request.id"] == answer[0].started.id


@pytest.mark.parametrize(
    ("request_", "code", "error"),
    [
        (pb.GenerateRequest(model="tiny"), grpc.StatusCode.INVALID_ARGUMENT, None),
        (REQUEST, grpc.StatusCode.UNAVAILABLE, "worker_lost"),
    ],
)
async def test_a_failure_is_the_spans_if_it_is_ours(
    gateway: RpcGateway,
    exporter: InMemorySpanExporter,
    request_: pb.GenerateRequest,
    code: grpc.StatusCode,
    error: str | None,
) -> None:
    gateway.engine.play([WorkerLost("gone")])
    assert (await gateway.refused(request_))[0] is code
    (server,) = [span for span in exporter.get_finished_spans() if span.name == METHOD]
    attributes = dict(server.attributes or {})
    assert attributes["rpc.grpc.status_code"] == code.value[0]
    assert attributes.get("error.type") == error
    assert server.status.is_ok is (error is None)


async def test_only_the_services_own_methods_have_spans(gateway: RpcGateway, exporter: InMemorySpanExporter) -> None:
    for path in ("/grpc.health.v1.Health/Check", "/x/y", "/tandem.v1.Generation/ListModels"):
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = gateway.channel.unary_unary(path)
        try:
            await method(b"")
        except grpc.aio.AioRpcError:
            assert path == "/x/y"
    assert [span.name for span in exporter.get_finished_spans()] == ["tandem.v1.Generation/ListModels"]


async def test_calls_are_counted_as_requests_are(gateway: RpcGateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await gateway.generate(REQUEST)
        await gateway.refused(pb.GenerateRequest(model="tiny"))
        await gateway.stub.ListModels(pb.ListModelsRequest())
    for method, code in (("Generate", "OK"), ("Generate", "INVALID_ARGUMENT"), ("ListModels", "OK")):
        assert sample(gateway, "tandem_rpc_calls_total", method=method, code=code) == 1
    assert sample(gateway, "tandem_request_success_total", finished_reason="stop") == 1
    assert sample(gateway, "tandem_generation_tokens_total") == 2
    assert sample(gateway, "tandem_time_to_first_token_seconds_count") == 1
    assert sample(gateway, "tandem_requests_running") == 0
    (line,) = [record for record in caplog.records if record.getMessage() == "request ended"]
    assert (line.model, line.num_tokens) == ("tiny", 2)  # type: ignore[attr-defined]  # given as `extra`
