"""Metrics: their names, what moves them, and that no client can add series."""

import asyncio
import random
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import InvalidSetting
from common.messages.registry import WorkerHealth, WorkerLoad
from common.telemetry.endpoint import HealthReport, HealthServer
from common.telemetry.metrics import LATENCY_BUCKETS_S, GatewayMetrics, WorkerMetrics
from common.telemetry.vllm_names import alias_gateway, alias_worker

LOAD = WorkerLoad(WorkerHealth.READY, blocks_total=100, blocks_free=75, blocks_cached=20, num_running=3, num_waiting=2)


@pytest.fixture
def gateway() -> GatewayMetrics:
    return GatewayMetrics(CollectorRegistry())


@pytest.fixture
def worker() -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry())


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """Return the exposed samples by name and labels, read back from the text format."""
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_gateway_names(gateway: GatewayMetrics) -> None:
    names = {name for name in exposed(gateway.registry) if "bucket" not in name}
    assert names >= {
        "tandem_requests_running",
        "tandem_time_to_first_token_seconds_count",
        "tandem_inter_token_latency_seconds_sum",
        "tandem_e2e_request_latency_seconds_count",
        "tandem_prompt_tokens_total",
        "tandem_generation_tokens_total",
        "tandem_request_aborted_total",
        "tandem_placements_total{kind=first}",
        "tandem_broker_reconnects_total",
    }
    assert all(name.startswith("tandem_") for name in names)
    assert not [name for name in names if name.endswith("_created")]


def test_worker_names(worker: WorkerMetrics) -> None:
    worker.note_pull("shm", 1, 0.1)
    worker.note_handover("remote")
    names = set(exposed(worker.registry))
    assert names >= {
        "tandem_kv_blocks",
        "tandem_kv_blocks_free",
        "tandem_kv_blocks_cached",
        "tandem_kv_cache_usage_ratio",
        "tandem_num_requests_running",
        "tandem_num_requests_waiting",
        "tandem_engine_steps_total",
        "tandem_step_duration_seconds_count",
        "tandem_prefill_tokens_total",
        "tandem_transfer_bytes_total{transport=shm}",
        "tandem_transfer_seconds_count",
        "tandem_transfer_failures_total",
        "tandem_handovers_total{outcome=remote}",
        "tandem_preemptions_total",
        "tandem_nan_logits_total",
        "tandem_stale_messages_total",
    }


def test_latency_buckets_reach_from_a_millisecond_to_two_minutes(gateway: GatewayMetrics) -> None:
    assert (LATENCY_BUCKETS_S[0], LATENCY_BUCKETS_S[-1]) == (0.001, 120.0)
    assert list(LATENCY_BUCKETS_S) == sorted(set(LATENCY_BUCKETS_S))
    gateway.ttft.observe(3.5)
    samples = exposed(gateway.registry)
    assert samples["tandem_time_to_first_token_seconds_bucket{le=2.5}"] == 0
    assert samples["tandem_time_to_first_token_seconds_bucket{le=5.0}"] == 1


def test_a_step_counts_once_and_shows_the_load(worker: WorkerMetrics) -> None:
    worker.note_step(0.02, 17)
    worker.note_step(0.0, 0)
    worker.note_load(LOAD)
    samples = exposed(worker.registry)
    assert samples["tandem_engine_steps_total"] == samples["tandem_step_duration_seconds_count"] == 1
    assert samples["tandem_engine_step_tokens_total"] == 17
    assert samples["tandem_kv_cache_usage_ratio"] == 0.25
    assert (samples["tandem_kv_blocks_free"], samples["tandem_num_requests_waiting"]) == (75, 2)


def test_what_a_load_counts_since_the_process_began_moves_the_counters(worker: WorkerMetrics) -> None:
    load = WorkerLoad(
        WorkerHealth.STALLED,
        num_bindings=2,
        num_quarantined=3,
        num_placements=5,
        num_failovers=1,
        num_tries=7,
        num_stale=8,
        num_cancelled_chunks=9,
        num_violations=10,
    )
    for _ in range(2):  # told again: nothing new
        worker.note_load(load)
    samples = exposed(worker.registry)
    assert samples["tandem_bindings"] == 2
    assert samples["tandem_kv_blocks_quarantined"] == 3
    assert samples["tandem_worker_placements_total{kind=first}"] == 4
    assert samples["tandem_worker_placements_total{kind=again}"] == 1
    assert samples["tandem_prefill_tries_total"] == 7
    assert samples["tandem_stale_messages_total"] == 8
    assert samples["tandem_cancelled_chunks_total"] == 9
    assert samples["tandem_integrity_violations_total"] == 10
    assert samples["tandem_engine_stalled"] == 1
    worker.note_load(msgspec.structs.replace(load, health=WorkerHealth.READY, num_tries=8, num_bindings=0))
    samples = exposed(worker.registry)
    assert (samples["tandem_prefill_tries_total"], samples["tandem_bindings"]) == (8, 0)
    assert samples["tandem_engine_stalled"] == 0


def test_a_worker_without_blocks_has_usage_zero(worker: WorkerMetrics) -> None:
    worker.note_load(WorkerLoad(WorkerHealth.LOADING))
    assert exposed(worker.registry)["tandem_kv_cache_usage_ratio"] == 0.0


def test_client_input_never_adds_series(gateway: GatewayMetrics, worker: WorkerMetrics) -> None:
    def use(endpoint: str, status: int, word: str) -> None:
        gateway.note_answer(endpoint, status)
        gateway.note_end(word)
        worker.note_handover(word)
        worker.note_pull(word, 1, 0.1)

    use("/x.php", 299, "first")
    before = len(exposed(gateway.registry)) + len(exposed(worker.registry))
    source = random.Random(0)
    for _ in range(2000):
        word = "".join(source.choices(string.printable, k=8))
        use("/" + word, source.randrange(600, 1000), word)
    assert len(exposed(gateway.registry)) + len(exposed(worker.registry)) == before
    assert exposed(gateway.registry)["tandem_requests_total{endpoint=other}{status=other}"] == 2001


def test_answers_and_ends_are_counted_by_their_labels(gateway: GatewayMetrics) -> None:
    gateway.note_answer("/v1/models", 200)
    gateway.note_end("stop")
    gateway.note_end("abort")
    samples = exposed(gateway.registry)
    assert samples["tandem_requests_total{endpoint=/v1/models}{status=200}"] == 1
    assert samples["tandem_request_success_total{finished_reason=stop}"] == 1
    assert samples["tandem_request_aborted_total"] == 1


def test_vllm_names_show_the_same_values(gateway: GatewayMetrics, worker: WorkerMetrics) -> None:
    alias_gateway(gateway, "smol")
    alias_worker(worker, "smol")
    gateway.ttft.observe(0.2)
    gateway.prompt.inc(5)
    gateway.note_end("length")
    worker.note_load(LOAD)
    theirs = exposed(gateway.registry)
    assert theirs["vllm:time_to_first_token_seconds_bucket{le=0.25}{model_name=smol}"] == 1
    assert theirs["vllm:time_to_first_token_seconds_sum{model_name=smol}"] == 0.2
    assert theirs["vllm:prompt_tokens_total{model_name=smol}"] == 5
    assert theirs["vllm:generation_tokens_total{model_name=smol}"] == 0
    assert theirs["vllm:request_success_total{finished_reason=length}{model_name=smol}"] == 1
    assert "vllm:inter_token_latency_seconds_count{model_name=smol}" in theirs
    assert "vllm:e2e_request_latency_seconds_count{model_name=smol}" in theirs
    ours = exposed(worker.registry)
    assert ours["vllm:kv_cache_usage_perc{model_name=smol}"] == 0.25
    assert ours["vllm:num_requests_running{model_name=smol}"] == 3
    assert ours["vllm:num_requests_waiting{model_name=smol}"] == 2


def test_vllm_names_are_off_by_default(gateway: GatewayMetrics) -> None:
    assert not [name for name in exposed(gateway.registry) if name.startswith("vllm:")]


@dataclass
class Serving:
    url: str
    port: int
    report: HealthReport


@pytest.fixture
async def serving(worker: WorkerMetrics) -> AsyncIterator[Serving]:
    serving = Serving("", 0, HealthReport(is_ready=False, reason="loading"))
    server = HealthServer(worker.registry, lambda: serving.report)
    serving.port = await server.start("127.0.0.1")
    serving.url = f"http://127.0.0.1:{serving.port}"
    yield serving
    await server.close()


async def test_health_follows_the_report(serving: Serving) -> None:
    async with aiohttp.ClientSession(serving.url) as session:

        async def status(path: str) -> tuple[int, object]:
            async with session.get(path) as answer:
                return answer.status, await answer.json()

        assert await status("/health/ready") == (503, {"ok": False, "reason": "loading"})
        assert (await status("/health/live"))[0] == 200
        serving.report = HealthReport(is_ready=True)
        assert (await status("/health/ready"))[0] == 200
        serving.report = HealthReport(is_ready=False, reason="wedged", is_live=False)
        assert (await status("/health/live"))[0] == 503


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0", "???"])
async def test_metrics_are_served_in_the_form_asked_for(serving: Serving, worker: WorkerMetrics, accept: str) -> None:
    alias_worker(worker, "smol")
    worker.note_step(0.1, 1)
    async with (
        aiohttp.ClientSession(serving.url) as session,
        session.get("/metrics", headers={"Accept": accept}) as answer,
    ):
        text = await answer.text()
    assert "tandem_engine_steps_total 1.0" in text
    assert "vllm:num_requests_running" in text
    assert text.endswith("# EOF\n") == ("openmetrics" in accept)


async def test_a_port_in_use_is_a_bad_setting(serving: Serving, worker: WorkerMetrics) -> None:
    with pytest.raises(InvalidSetting, match="metrics address"):
        await HealthServer(worker.registry, lambda: serving.report).start("127.0.0.1", serving.port)


async def test_nonsense_on_the_port_fills_no_log(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
    assert (await reader.read()).split()[1] == b"400"
    writer.close()
    assert caplog.records == []
