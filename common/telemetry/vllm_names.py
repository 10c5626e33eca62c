"""Our metrics once more under the names of vLLM, for dashboards and autoscalers made for it; off unless asked for."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.telemetry.metrics import GatewayMetrics, WorkerMetrics


def alias_gateway(metrics: GatewayMetrics, model: str) -> None:
    """Expose a gateway's metrics under vLLM's names too, with the label `model_name`."""
    sources: Mapping[str, Collector] = {
        "vllm:time_to_first_token_seconds": metrics.ttft,
        "vllm:inter_token_latency_seconds": metrics.itl,
        "vllm:e2e_request_latency_seconds": metrics.e2e,
        "vllm:prompt_tokens": metrics.prompt,
        "vllm:generation_tokens": metrics.generation,
        "vllm:request_success": metrics.success,
    }
    _register(metrics.registry, sources, model)


def alias_worker(metrics: WorkerMetrics, model: str) -> None:
    """Expose a worker's metrics under vLLM's names too, with the label `model_name`."""
    sources: Mapping[str, Collector] = {
        "vllm:num_requests_running": metrics.running,
        "vllm:num_requests_waiting": metrics.waiting,
        "vllm:kv_cache_usage_perc": metrics.usage,  # a ratio from 0 to 1, in spite of its name
    }
    _register(metrics.registry, sources, model)


def _register(registry: CollectorRegistry, sources: Mapping[str, Collector], model: str) -> None:
    registry.register(_Aliases(sources, model))


class _Aliases(Collector):
    """Reads the values when they are asked for; `sources` by the name to show them under."""

    def __init__(self, sources: Mapping[str, Collector], model: str) -> None:
        self._sources = sources
        self._labels = {"model_name": model}

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics under their other names."""
        for name, source in self._sources.items():
            for family in source.collect():
                yield self._renamed(family, name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(name + suffix, {**sample.labels, **self._labels}, sample.value)
        return renamed
