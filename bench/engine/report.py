"""The figures of `bench.engine` as tables: on the screen, as JSON, and in the documents."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.engine.steps import BATCHES, CONTEXTS, PROMPTS, Machine, Measured
from bench.machine import commit, machine
from bench.tables import PERFORMANCE, markdown, rewrite, shown

MARKER = "bench-engine"
HEAD = ("", "threads", "ms", "limit, ms", "share of the limit", "tokens/s")


def rows(measured: Sequence[Measured]) -> list[list[str]]:
    """Return one row per shape."""
    return [
        [
            _name(one),
            str(one.threads),
            shown(1000 * one.seconds),
            shown(1000 * one.floor_s),
            f"{one.floor_s / one.seconds:.0%}",
            shown((one.batch if one.kind == "decode" else one.context) / one.seconds),
        ]
        for one in measured
    ]


def limit_lines(machines: Sequence[Machine]) -> list[str]:
    """Return what the threads could do."""
    return [
        f"{one.threads} thread{'s' * (one.threads > 1)}: reads {one.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {one.flops_per_s / 1e9:,.0f} GFLOP/s in bf16 ({one.model})"
        for one in machines
    ]


def write_json(path: Path, machines: Sequence[Machine], measured: Sequence[Measured]) -> None:
    """Write all figures, with the machine and the commit."""
    written = {
        "commit": commit(),
        "machine": machine(),
        "limits": [msgspec.to_builtins(one) for one in machines],
        "steps": [msgspec.to_builtins(one) for one in measured],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def is_complete(machines: Sequence[Machine], measured: Sequence[Measured]) -> bool:
    """Return whether every length of context and prompt, and every batch, was measured with every number of threads."""
    shapes = {(one.threads, one.kind, one.context) for one in measured}
    batches = {(one.threads, one.batch) for one in measured if one.kind == "decode"}
    return bool(machines) and all(
        {(one.threads, "decode", length) for length in CONTEXTS} <= shapes
        and {(one.threads, "prefill", length) for length in PROMPTS} <= shapes
        and {(one.threads, batch) for batch in BATCHES} <= batches
        for one in machines
    )


def write_document(machines: Sequence[Machine], measured: Sequence[Measured], file: Path = PERFORMANCE) -> None:
    """Rewrite the table of the documents."""
    about = machine()
    head = f"{about['cpu']}, {about['cores']} cores, commit {commit()}; " + "; ".join(limit_lines(machines)) + "."
    rewrite(file, MARKER, head + "\n\n" + markdown(HEAD, rows(measured)))


def _name(one: Measured) -> str:
    if one.kind == "prefill":
        return f"prompt of {one.context} tokens, in chunks"
    return f"decode step of {one.batch}, context {one.context}"
