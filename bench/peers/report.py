"""The figures side by side: medians over the rounds, ratios to each peer, JSON, and the table of the documents."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import commit, machine
from bench.peers.engines import LABELS, TANDEM
from bench.peers.figures import Figures
from bench.peers.plan import NAMES, RATES, STREAMS
from bench.tables import PERFORMANCE, markdown, rewrite, shown

MARKER = "bench-peers"

ROWS = (
    ("lone", "ttft_p50_ms", "lone prompt of 128 tokens: TTFT, ms"),
    *(
        (f"streams-{num}", figure, f"{num} stream{'s' * (num > 1)}: {text}")
        for num in STREAMS
        for figure, text in (
            ("tokens_per_s", "tokens/s"),
            ("ttft_p50_ms", "TTFT p50, ms"),
            ("itl_p50_ms", "ITL p50, ms"),
            ("itl_p99_ms", "ITL p99, ms"),
        )
    ),
    ("prefill", "prompt_tokens_per_s", "8 prompts of 1024 at once beside 4 streams: prompt tokens/s"),
    ("prefill", "running_tokens_per_s", "the 4 streams meanwhile: tokens/s"),
    ("prefill", "itl_p99_ms", "the 4 streams meanwhile: ITL p99, ms"),
    *((f"mixed-{rate:g}", "goodput_per_s", f"mixed, {rate:g} requests/s: goodput, requests/s") for rate in RATES),
)

Rounds = dict[str, dict[str, list[Figures]]]
"""Figures of each round by engine, by workload."""


@dataclass
class Record:
    """What has been measured of one commit on one machine."""

    rounds: Rounds = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, workload: str, engine: str, figures: Figures) -> None:
        """Take in one round."""
        self.rounds.setdefault(workload, {}).setdefault(engine, []).append(figures)

    def median(self, workload: str, engine: str, figure: str) -> float | None:
        """Return the median over the rounds, None if it was not measured."""
        values = [one[figure] for one in self.rounds.get(workload, {}).get(engine, ()) if figure in one]
        return statistics.median(values) if values else None

    def engines(self) -> list[str]:
        """Return who was measured, Tandem first."""
        return [name for name in LABELS if any(name in by_engine for by_engine in self.rounds.values())]

    def is_complete(self) -> bool:
        """Return whether every workload was run by everybody."""
        return all(set(self.rounds.get(name, {})) == set(LABELS) for name in NAMES)


def load(path: Path) -> Record:
    """Return what an earlier run of this commit on such a machine wrote, else an empty record."""
    if not path.exists():
        return Record()
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if written["commit"] != commit() or written["machine"]["cpu"] != machine()["cpu"]:
        return Record()
    return Record(written["rounds"])


def write_json(path: Path, record: Record) -> None:
    """Write all figures of all rounds, with the machine and the commit."""
    medians = dict(zip((text for *_, text in ROWS), _medians(record), strict=True))
    written = {
        "commit": commit(),
        "machine": machine(),
        "labels": LABELS,
        "rounds": record.rounds,
        "medians": medians,
        "notes": record.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def print_table(record: Record) -> None:
    """Print the medians and the ratios of Tandem to each peer, then the notes."""
    head, rows = _table(record)
    console = Console(width=max(100, 60 + 18 * len(head)))
    table = Table(title="medians of the rounds")
    for place, title in enumerate(head):
        table.add_column(title, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in record.notes:
        console.print(note, highlight=False)


def write_document(record: Record, file: Path = PERFORMANCE) -> bool:
    """Rewrite the table of the documents if the record is complete; return whether it was."""
    if not record.is_complete():
        return False
    head, rows = _table(record)
    num_rounds = min(len(rounds) for by_engine in record.rounds.values() for rounds in by_engine.values())
    about = machine()
    rewrite(
        file,
        MARKER,
        f"{about['cpu']}, {about['cores']} cores, commit {commit()}, medians of at least {num_rounds} rounds:\n\n"
        + markdown(head, rows),
    )
    return True


def tell_progress(workload: str, engine: str, figures: Mapping[str, float]) -> None:
    """Say what has just been measured, beside the output."""
    told = ", ".join(f"{name} {shown(value)}" for name, value in figures.items())
    Console(stderr=True, width=200).print(f"{workload}: {LABELS[engine]}: {told}", highlight=False)


def _table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows that were measured; a ratio is Tandem's figure by the peer's."""
    engines = record.engines()
    peers = [name for name in engines if name != TANDEM]
    head = ["", *(LABELS[name] for name in engines), *(f"Tandem / {LABELS[name]}" for name in peers)]
    rows = []
    for (_, _, text), by_engine in zip(ROWS, _medians(record), strict=True):
        if by_engine:
            ratios = [_ratio(by_engine.get(TANDEM), by_engine.get(peer)) for peer in peers]
            rows.append([text, *(shown(by_engine.get(name)) for name in engines), *map(shown, ratios)])
    return head, rows


def _medians(record: Record) -> Sequence[Mapping[str, float]]:
    rows = []
    for workload, figure, _ in ROWS:
        values = {name: record.median(workload, name, figure) for name in record.engines()}
        rows.append({name: value for name, value in values.items() if value is not None})
    return rows


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs
