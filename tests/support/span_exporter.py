"""Keeps the spans that a test makes in this process."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry import traces


def span_exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return where every span ends from now on, until the test is over."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_tracer", provider.get_tracer("tandem", schema_url=traces.SCHEMA_URL))
    return exporter
