"""What a running cluster tells about its requests: one trace each, metrics and logs, but never their text."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.messages.registry import Role
from tests.support.cluster import Cluster
from tests.support.observation import Observation, worker
from tests.support.otlp_collector import Collector, SeenSpan
from tests.support.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
SERVER = f"POST {COMPLETIONS}"
SECRET_TEXT = "Xylophone-Quetzalcoatl"
REMOTE_PROMPT = f"{SECRET_TEXT} was asked for a long prompt, which is prefilled elsewhere. " * 2
LOCAL_PROMPT = "short"
STAGES = ("admit", "tokenize", "queue", "prefill", "decode")

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where all processes send their spans."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def options(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model whose processes say all that they can say."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--log-level", "debug"]
    return [*options, "--otlp-endpoint", collector.endpoint, "--vllm-metrics"]


@pytest.fixture(scope="module")
def cluster(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prompts are prefilled elsewhere."""
    running = _started(tmp_path_factory.mktemp("traces"), *options, "--disaggregation", "always")
    yield running
    running.stop()


@pytest.fixture
def lone_cluster(options: list[str], tmp_path: Path) -> Iterator[Cluster]:
    """Prompts are prefilled where they are decoded."""
    running = _started(tmp_path / "state", *options, "--prefill", "0")
    yield running
    running.stop()


def _started(folder: Path, *options: str) -> Cluster:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        return Cluster(folder, list(options)).start()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with the gateway of a cluster whose workers know each other."""
    async with aiohttp.ClientSession(cluster.url) as session, Observation(cluster) as observation:
        async with asyncio.timeout(30):
            while worker(await observation.overview(), Role.PREFILL).load.num_steps == 0:
                await complete(session, f"{secrets.token_hex(32)} goes to a prefill worker as soon as one is known")
        yield session


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields


def parent_of(trace: str, flags: str = "01") -> dict[str, str]:
    return {"TraceParent": f"00-{trace}-00f067aa0ba902b7-{flags}", "TraceState": "vendor=state"}


async def complete(client: aiohttp.ClientSession, prompt: str, trace: str = "", **fields: Any) -> dict[str, Any]:
    headers = parent_of(trace) if trace else {}
    async with client.post(COMPLETIONS, json=body(prompt, **fields), headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def check_family(spans: dict[str, SeenSpan]) -> None:
    """All stages are children of the SERVER span, which is a child of the caller's."""
    server = spans[SERVER]
    assert (server.service, server.instance[:8], server.kind) == ("gateway", "gateway-", 2)
    assert server.parent == "00f067aa0ba902b7"
    assert {span.parent for name, span in spans.items() if name != SERVER} == {server.id}
    assert {span.tracestate for span in spans.values()} == {"vendor=state"}
    assert len({span.attributes["tandem.request.id"] for span in spans.values()}) == 1
    assert {span.error for span in spans.values()} == {None}
    assert [name for name in STAGES if spans[name].start_ns < server.start_ns] == []
    starts = [spans[name].start_ns for name in STAGES]
    assert starts == sorted(starts)


async def test_b124_the_trace_of_a_remote_prefill(client: aiohttp.ClientSession, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    answer = await complete(client, REMOTE_PROMPT, trace, seed=5, top_k=3)
    spans = await asyncio.to_thread(collector.trace, trace, 7)
    check_family(spans)
    assert {name: span.service for name, span in spans.items()} == {
        SERVER: "gateway",
        "admit": "gateway",
        "tokenize": "gateway",
        "queue": "gateway",
        "prefill": "prefill-worker",
        "transfer": "decode-worker",
        "decode": "decode-worker",
    }
    assert spans["transfer"].links == (spans["prefill"].id,)
    assert (spans["prefill"].instance, spans["decode"].instance) == ("prefill-0", "decode-0")
    num_prompt = answer["usage"]["prompt_tokens"]
    expected = {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "url.path": COMPLETIONS,
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.seed": 5,
        "gen_ai.request.top_k": 3.0,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 6,
    }
    attributes = spans[SERVER].attributes
    assert {name: attributes.get(name) for name in expected} == expected
    assert spans["queue"].attributes["tandem.worker"] == "decode-0"
    assert spans["prefill"].attributes["gen_ai.usage.input_tokens"] == num_prompt
    assert spans["transfer"].attributes["tandem.transfer.pages"] == -(-num_prompt // 16)
    assert spans["transfer"].attributes["tandem.transfer.source"] == "prefill-0"
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 6
    assert spans["decode"].attributes["tandem.prefill.place"] == "remote"
    assert spans["decode"].attributes["tandem.prefill.reason"] == "setting"


async def test_b124_the_trace_of_a_local_prefill(lone_cluster: Cluster, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    async with aiohttp.ClientSession(lone_cluster.url) as client:
        await complete(client, LOCAL_PROMPT, trace)
        async with Observation(lone_cluster) as observation:
            address = worker(await observation.overview(), Role.DECODE).record.metrics_address
        metrics = await _metrics(client, f"http://{address}/metrics")
    spans = await asyncio.to_thread(collector.trace, trace, 6)
    check_family(spans)
    assert set(spans) == {SERVER, *STAGES}
    assert spans["prefill"].service == spans["decode"].service == "decode-worker"
    assert spans["prefill"].end_ns == spans["decode"].start_ns
    assert spans["decode"].attributes["tandem.prefill.place"] == "local"
    assert spans["decode"].attributes["tandem.prefill.reason"] == "absent"
    assert metrics["tandem_prefill_tokens_total"] > 0
    assert metrics['tandem_prefill_decisions_total{place="local",reason="absent"}'] > 0


async def test_b124_a_caller_who_does_not_sample_is_respected(
    client: aiohttp.ClientSession, collector: Collector
) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    async with client.post(COMPLETIONS, json=body(REMOTE_PROMPT), headers=parent_of(unsampled, "00")) as response:
        assert response.status == 200
    await complete(client, "another prompt that is long enough for a remote prefill", sampled)
    await asyncio.to_thread(collector.trace, sampled, 7)
    assert collector.spans(unsampled) == []


async def test_b125_interleaved_requests_keep_to_their_traces(
    client: aiohttp.ClientSession, collector: Collector
) -> None:
    num_before = len(collector.spans())
    traces = [secrets.token_hex(16) if number % 3 else "" for number in range(50)]

    async def serve(number: int, trace: str) -> None:
        prompt = f"request {number} " * (6 if number % 2 else 1)
        if number % 10 != 7:
            await complete(client, prompt, trace)
            return
        fields = body(prompt, max_tokens=1500, stream=True)
        async with client.post(COMPLETIONS, json=fields, headers=parent_of(trace) if trace else {}) as response:
            for _ in range(6):  # three events: the decode worker has begun
                await response.content.readline()
            response.close()

    await asyncio.gather(*(serve(number, trace) for number, trace in enumerate(traces)))
    spans = await asyncio.to_thread(
        collector.until, lambda spans: sum(span.name in (SERVER, "decode") for span in spans[num_before:]) == 100
    )
    requests: dict[str, set[str]] = {}
    for span in spans[num_before:]:
        requests.setdefault(span.trace, set()).add(span.attributes["tandem.request.id"])
    assert all(len(ids) == 1 for ids in requests.values())
    assert len(set.union(*requests.values())) == len(requests) == 50
    assert set(filter(None, traces)) < set(requests)
    aborted = [span for span in spans[num_before:] if span.error is not None]
    assert {(span.name, span.error) for span in aborted} == {(SERVER, "aborted"), ("decode", "cancelled")}
    assert len(aborted) == 10


async def test_b053_the_usage_tells_what_was_cached(client: aiohttp.ClientSession) -> None:
    prompt = "A prompt of some blocks, first cold and then warm, in every way that an answer can end. "

    async def cached(**fields: Any) -> int:
        usage = (await complete(client, prompt, **fields))["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    cold = await complete(client, prompt, max_tokens=8)
    num_prompt, text = cold["usage"]["prompt_tokens"], cold["choices"][0]["text"]
    warm = (num_prompt - 1) // 16 * 16
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm >= 16
    assert await cached() == warm
    assert await cached(stop=[text[0]]) == warm
    assert await cached(max_tokens=1) == warm
    async with client.post(
        COMPLETIONS, json=body(prompt, stop=[text[0]], stream=True, stream_options={"include_usage": True})
    ) as response:
        events = [json.loads(line[6:]) for line in (await response.read()).splitlines() if line[:7] == b"data: {"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == warm


async def test_metrics_of_every_process(cluster: Cluster, client: aiohttp.ClientSession) -> None:
    async with Observation(cluster) as observation:
        overview = await observation.overview()
    addresses = {role: worker(overview, role).record.metrics_address for role in Role}
    decode = await _metrics(client, f"http://{addresses[Role.DECODE]}/metrics")
    prefill = await _metrics(client, f"http://{addresses[Role.PREFILL]}/metrics")
    gateway = await _metrics(client, "/metrics")
    for name in ("tandem_prefill_tokens_total", "tandem_engine_steps_total", "tandem_engine_step_tokens_total"):
        assert prefill[name] > 0
    assert prefill["tandem_prefill_tokens_total"] == prefill["tandem_engine_step_tokens_total"]
    assert decode["tandem_prefill_tokens_total"] < decode["tandem_engine_step_tokens_total"]
    assert decode['tandem_handovers_total{outcome="remote"}'] > 0
    assert decode['tandem_prefill_decisions_total{place="remote",reason="setting"}'] > 0
    assert decode['tandem_transfer_bytes_total{transport="shm"}'] > 0
    assert decode["tandem_transfer_failures_total"] == 0
    assert decode["tandem_kv_blocks"] == decode["tandem_kv_blocks_free"]
    assert decode['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0
    assert prefill['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert gateway['tandem_placements_total{kind="first"}'] > 50
    assert gateway['tandem_placements_total{kind="again"}'] == 0
    assert gateway["tandem_request_aborted_total"] == 5
    assert gateway['vllm:request_success_total{finished_reason="abort",model_name="tiny"}'] == 5


async def test_logs_name_the_request_and_never_its_text(
    cluster: Cluster, client: aiohttp.ClientSession, collector: Collector
) -> None:
    trace = secrets.token_hex(16)
    answer = await complete(client, f"{SECRET_TEXT} in a prompt that nobody has seen before", trace, max_tokens=40)
    spans = await asyncio.to_thread(collector.trace, trace, 7)
    request = spans[SERVER].attributes["tandem.request.id"]
    logs = {path.stem: path.read_text(encoding="utf-8") for path in (cluster.state_dir / "logs").glob("*.log")}
    for process, message in {"gateway-0": "request", "decode-0": "request", "prefill-0": "prefill"}.items():
        lines = [json.loads(line) for line in logs[process].splitlines()]
        ends = [line for line in lines if line["message"] == f"{message} ended" and line.get("request_id") == request]
        assert len(ends) == 1, process
    text = answer["choices"][0]["text"]
    told = [*logs.values(), collector.bodies().decode("latin-1")]
    for unspeakable in (SECRET_TEXT, text, json.dumps(text)[1:-1]):
        assert not [where for where in told if unspeakable in where]


async def _metrics(client: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with client.get(url) as response:
        lines = (await response.text()).splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}
