"""The histogram of tokens against the client library's."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from common.telemetry.latencies import LatencyHistogram

BOUNDS = (0.001, 0.0025, 0.5, 1.0, 20.0)


@pytest.mark.parametrize("values", [[], [0.0], [0.001, 0.0011, 0.0025], [20.0, 20.1, 1e9], [0.3] * 5])
def test_it_shows_what_the_library_shows(values: list[float]) -> None:
    own, other = CollectorRegistry(), CollectorRegistry()
    latencies = LatencyHistogram("tandem_x_seconds", "Between two of them", BOUNDS, own)
    reference = Histogram("tandem_x_seconds", "Between two of them", buckets=BOUNDS, registry=other)
    for value in values:
        latencies.observe(value)
        reference.observe(value)
    assert generate_latest(own) == generate_latest(other)


def test_equal_observations_count_at_once() -> None:
    own, other = CollectorRegistry(), CollectorRegistry()
    LatencyHistogram("x_seconds", "x", BOUNDS, own).observe(0.25, times=4)
    single = LatencyHistogram("x_seconds", "x", BOUNDS, other)
    for _ in range(4):
        single.observe(0.25)
    assert generate_latest(own) == generate_latest(other)
