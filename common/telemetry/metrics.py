"""The metrics of gateways and workers, in Prometheus' base units. No label value ever comes from a client.

Names as they are exposed: counters end in `_total`, which the client library appends.
"""

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from common.messages.registry import WorkerHealth, WorkerLoad
from common.telemetry.latencies import LatencyHistogram

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0),
)
OTHER = "other"
"""The label value of everything that is not known beforehand."""

ENDPOINTS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"),
        *("/health/live", "/health/ready", "/metrics"),
    }
)
STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 503, 504})
FINISHED_REASONS = frozenset({"stop", "length", "abort", "error"})
HANDOVER_OUTCOMES = frozenset({"remote", "local", "retry", "lease_expired"})
PREFILL_PLACES = frozenset({"local", "remote"})
PREFILL_REASONS = frozenset({"setting", "alone", "absent", "short", "cached", "unmeasured", "probe", "cost"})
"""Why a prompt was prefilled there: told to; it runs alone; no prefill worker is there; it is short; nothing is known
elsewhere yet, and most of it is cached here, or not; to find out; the first token was expected sooner."""
PLACEMENT_KINDS = frozenset({"first", "again"})
FAILOVER_REASONS = frozenset({"lost", "stalled", "drained", "displaced", "failed", "refused", "unaccepted"})
"""Why a placement was given up: its worker was gone, made no progress or was leaving; it made room for a request that
runs alone; it said so itself; its tokens did not continue what was shown; nobody took it in."""
REFUSALS = frozenset(
    {"requests", "tokens", "concurrency", "overloaded", "draining", "unavailable", "key", "permission"}
)
"""Why a request was not let in: a limit of its key, no room, this process leaves, Redis or every worker is away, no
good key, a key that is not good for this."""
TRANSPORTS = frozenset({"shm", "tcp", "memory"})

disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped; spares a second series per counter


def known(value: str, values: Collection[str]) -> str:
    """Return `value` if it is one of `values`, else `OTHER`: the number of series stays bounded."""
    return value if value in values else OTHER


class GatewayMetrics:
    """What clients experience. TTFT and latencies are measured at the gateway, queueing included."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._known_series: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self.running = Gauge("tandem_requests_running", "Requests being served", registry=registry)
        self.requests = Counter("tandem_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry)
        self.calls = Counter(
            "tandem_rpc_calls", "Calls of the gRPC service for clients ended", ["method", "code"], registry=registry
        )
        self.ttft = LatencyHistogram(
            "tandem_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            LATENCY_BUCKETS_S,
            registry,
        )
        self.itl = LatencyHistogram(
            "tandem_inter_token_latency_seconds", "Between two tokens of a request", LATENCY_BUCKETS_S, registry
        )
        self.e2e = LatencyHistogram(
            "tandem_e2e_request_latency_seconds", "From a request's arrival to its end", LATENCY_BUCKETS_S, registry
        )
        self.prompt = Counter("tandem_prompt_tokens", "Prompt tokens of generation requests", registry=registry)
        self.generation = Counter("tandem_generation_tokens", "Tokens generated for clients", registry=registry)
        self.success = Counter(
            "tandem_request_success", "Generation requests ended", ["finished_reason"], registry=registry
        )
        self.aborted = Counter("tandem_request_aborted", "Requests whose client left", registry=registry)
        self.failures = Counter("tandem_request_failures", "Requests that failed", ["code"], registry=registry)
        self.refusals = Counter(
            "tandem_requests_refused", "Requests that were not let in", ["reason"], registry=registry
        )
        for reason in REFUSALS:
            self.refusals.labels(reason=reason)
        self.placements = Counter(
            "tandem_placements", "Placements of requests; again: the one before was lost", ["kind"], registry=registry
        )
        for kind in PLACEMENT_KINDS:
            self.placements.labels(kind=kind)
        self.failovers = Counter(
            "tandem_failovers", "Placements given up for another one", ["reason"], registry=registry
        )
        for reason in FAILOVER_REASONS:
            self.failovers.labels(reason=reason)
        self.lost_tries = Counter(
            "tandem_lost_tries", "Prefill workers lost over requests of this gateway", registry=registry
        )
        self.stale_messages = Counter(
            "tandem_stale_messages", "Events of placements that are not current", registry=registry
        )
        self.canary_duration = _latency(
            "tandem_canary_seconds", "Two tokens through place, prefill, transfer and decode", registry
        )
        self.canary_failures = Counter("tandem_canary_failures", "Canaries that did not come back", registry=registry)
        self.broker_reconnects = Counter(
            "tandem_broker_reconnects", "Times that Redis was found again", registry=registry
        )

    def note_answer(self, endpoint: str, status: int) -> None:
        """Count an HTTP answer. `endpoint` is the route's template; anything else counts as `OTHER`."""
        label = str(status) if status in STATUSES else OTHER
        self._series(self.requests, known(endpoint, ENDPOINTS), label).inc()

    def note_call(self, method: str, code: str) -> None:
        """Count a gRPC call by the names of its method and of its status, of which there are few."""
        self.calls.labels(method=method, code=code).inc()

    def note_refusal(self, reason: str) -> None:
        """Count a request that was not let in (one of `REFUSALS`)."""
        self.refusals.labels(reason=known(reason, REFUSALS)).inc()

    def note_placement(self, kind: str) -> None:
        """Count a placement (one of `PLACEMENT_KINDS`)."""
        self._series(self.placements, known(kind, PLACEMENT_KINDS)).inc()

    def note_failover(self, reason: str) -> None:
        """Count a placement given up (one of `FAILOVER_REASONS`)."""
        self.failovers.labels(reason=known(reason, FAILOVER_REASONS)).inc()

    def note_end(self, finished_reason: str) -> None:
        """Count the end of a generation request: stop, length, abort or error."""
        self._series(self.success, known(finished_reason, FINISHED_REASONS)).inc()
        if finished_reason == "abort":
            self.aborted.inc()

    def _series(self, counter: Counter, *labels: str) -> Counter:
        """Return a counter's child of those labels; the client library takes 10 us to find one."""
        key = (counter, labels)
        series = self._known_series.get(key)
        if series is None:
            series = self._known_series[key] = counter.labels(*labels)
        return series


class _Total:
    """Moves a counter along with a number of the load that only grows."""

    def __init__(self, counter: Counter, number: Callable[[WorkerLoad], int]) -> None:
        self._counter = counter
        self._number = number
        self._last = 0

    def follow(self, load: WorkerLoad) -> None:
        """Count what is new."""
        number = self._number(load)
        self._counter.inc(number - self._last)
        self._last = number


class WorkerMetrics:
    """What one worker does. Owned by its event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.blocks = Gauge("tandem_kv_blocks", "Blocks of the KV pool", registry=registry)
        self.blocks_free = Gauge(
            "tandem_kv_blocks_free", "Blocks that can be taken now, cached ones included", registry=registry
        )
        self.blocks_cached = Gauge(
            "tandem_kv_blocks_cached", "Free blocks that hold a cached prefix", registry=registry
        )
        self.usage = Gauge("tandem_kv_cache_usage_ratio", "Share of the blocks that are in use", registry=registry)
        self.running = Gauge("tandem_num_requests_running", "Sequences that are computed", registry=registry)
        self.waiting = Gauge("tandem_num_requests_waiting", "Sequences that wait for room", registry=registry)
        self.reserved = Gauge(
            "tandem_num_requests_reserved", "Sequences that hold pages and are being received", registry=registry
        )
        self.steps = Counter("tandem_engine_steps", "Engine steps", registry=registry)
        self.step_tokens = Counter("tandem_engine_step_tokens", "Tokens computed in engine steps", registry=registry)
        self.step_duration = _latency("tandem_step_duration_seconds", "Duration of an engine step", registry)
        self.prefill_tokens = Counter("tandem_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.transfer_bytes = Counter(
            "tandem_transfer_bytes", "Bytes of pages received", ["transport"], registry=registry
        )
        self.transfer_duration = _latency("tandem_transfer_seconds", "Duration of a pull of pages", registry)
        self.transfer_failures = Counter("tandem_transfer_failures", "Pulls that failed", registry=registry)
        self.handovers = Counter(
            "tandem_handovers", "Ends of attempts to have a prompt prefilled elsewhere", ["outcome"], registry=registry
        )
        self.prefill_decisions = Counter(
            "tandem_prefill_decisions",
            "Prompts by where they are prefilled, and why",
            ["place", "reason"],
            registry=registry,
        )
        self.prefill_expected = Histogram(
            "tandem_prefill_expected_seconds",
            "From the beginning of a prefill to its first token, as expected when its place was chosen",
            ["place"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prefill_duration = Histogram(
            "tandem_prefill_seconds",
            "From the beginning of a prefill whose duration was expected to its first token",
            ["place"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.preemptions = Counter("tandem_preemptions", "Sequences preempted for want of blocks", registry=registry)
        self.nan_logits = Counter("tandem_nan_logits", "Sequences that failed with NaN logits", registry=registry)
        self.stale_messages = Counter(
            "tandem_stale_messages", "Messages of superseded placements or tries", registry=registry
        )
        self.broker_reconnects = Counter(
            "tandem_broker_reconnects", "Times that Redis was found again", registry=registry
        )
        self.bindings = Gauge("tandem_bindings", "Hand-overs under way", registry=registry)
        self.blocks_quarantined = Gauge(
            "tandem_kv_blocks_quarantined", "Blocks that only a running copy still owns", registry=registry
        )
        self.placements = Counter(
            "tandem_worker_placements",
            "Placements taken in; again: they continue a lost one",
            ["kind"],
            registry=registry,
        )
        for kind in PLACEMENT_KINDS:
            self.placements.labels(kind=kind)
        self.tries = Counter("tandem_prefill_tries", "Prefill tries published or bound", registry=registry)
        self.cancelled_chunks = Counter(
            "tandem_cancelled_chunks", "Prompt chunks that a cancellation has spared", registry=registry
        )
        self.violations = Counter(
            "tandem_integrity_violations", "Times that the blocks' accounts did not add up", registry=registry
        )
        self.corrupt_pages = Counter(
            "tandem_corrupt_pages", "Pulled pages with another checksum than announced", registry=registry
        )
        self.stalled = Gauge("tandem_engine_stalled", "1 while the engine makes no progress", registry=registry)
        self._totals = (
            _Total(self.placements.labels(kind="first"), lambda load: load.num_placements - load.num_failovers),
            _Total(self.placements.labels(kind="again"), lambda load: load.num_failovers),
            _Total(self.tries, lambda load: load.num_tries),
            _Total(self.stale_messages, lambda load: load.num_stale),
            _Total(self.cancelled_chunks, lambda load: load.num_cancelled_chunks),
            _Total(self.violations, lambda load: load.num_violations),
        )

    def note_load(self, load: WorkerLoad) -> None:
        """Show how the worker stands; what the load counts since the process began moves the counters."""
        self.blocks.set(load.blocks_total)
        self.blocks_free.set(load.blocks_free)
        self.blocks_cached.set(load.blocks_cached)
        used = load.blocks_total - load.blocks_free
        self.usage.set(used / load.blocks_total if load.blocks_total else 0.0)
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.reserved.set(load.num_reserved)
        self.bindings.set(load.num_bindings)
        self.blocks_quarantined.set(load.num_quarantined)
        self.stalled.set(load.health is WorkerHealth.STALLED)
        for total in self._totals:
            total.follow(load)

    def note_step(self, step_s: float, num_tokens: int) -> None:
        """Count an engine step; no tokens means that no step ran."""
        if num_tokens:
            self.steps.inc()
            self.step_tokens.inc(num_tokens)
            self.step_duration.observe(step_s)

    def note_pull(self, transport: str, num_bytes: int, duration_s: float) -> None:
        """Count a pull that succeeded."""
        self.transfer_bytes.labels(transport=known(transport, TRANSPORTS)).inc(num_bytes)
        self.transfer_duration.observe(duration_s)

    def note_decision(self, place: str, reason: str) -> None:
        """Count where a prompt is prefilled (one of `PREFILL_PLACES`), and why (one of `PREFILL_REASONS`)."""
        self.prefill_decisions.labels(place=known(place, PREFILL_PLACES), reason=known(reason, PREFILL_REASONS)).inc()

    def note_prefill(self, place: str, expected_s: float, duration_s: float) -> None:
        """Count a prefill that took `duration_s` at one of `PREFILL_PLACES` and was expected to take `expected_s`."""
        label = known(place, PREFILL_PLACES)
        self.prefill_expected.labels(place=label).observe(expected_s)
        self.prefill_duration.labels(place=label).observe(duration_s)

    def note_handover(self, outcome: str) -> None:
        """Count the end of a hand-over attempt (one of `HANDOVER_OUTCOMES`)."""
        self.handovers.labels(outcome=known(outcome, HANDOVER_OUTCOMES)).inc()


def _latency(name: str, documentation: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, documentation, buckets=LATENCY_BUCKETS_S, registry=registry)
