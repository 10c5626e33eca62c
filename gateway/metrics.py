"""Stub until common/telemetry exists."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """Stub."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.ttft = Histogram("tandem_time_to_first_token_seconds", "x", buckets=SECONDS, registry=registry)
        self.itl = Histogram("tandem_inter_token_latency_seconds", "x", buckets=SECONDS, registry=registry)
        self.e2e = Histogram("tandem_e2e_request_latency_seconds", "x", buckets=SECONDS, registry=registry)
        self.success = Counter("tandem_request_success", "x", ["finished_reason"], registry=registry)
        self.prompt = Counter("tandem_prompt_tokens", "x", registry=registry)
        self.generation = Counter("tandem_generation_tokens", "x", registry=registry)
        self.running = Gauge("tandem_num_requests_running", "x", registry=registry)
