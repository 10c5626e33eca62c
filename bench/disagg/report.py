"""The modes side by side: means over the rounds, `auto` by the better of the others, JSON, and the documents' table."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import commit, machine
from bench.peers.figures import Figures
from bench.peers.plan import RATES
from bench.peers.report import Record
from bench.tables import PERFORMANCE, markdown, rewrite, shown

MARKER = "bench-disagg"
AUTO, ALWAYS, NEVER = "auto", "always", "never"
FLAGS = {
    AUTO: ("--disaggregation", AUTO),
    ALWAYS: ("--disaggregation", ALWAYS),
    NEVER: ("--disaggregation", NEVER, "--prefill", "0"),
}
"""Of `tandem up`, by mode."""

WORKLOADS = tuple(f"mixed-{rate:g}" for rate in RATES)
GOODPUT = "goodput_per_s"
FIGURES = (
    (GOODPUT, "goodput, requests/s"),
    ("ttft_p50_ms", "TTFT p50, ms"),
    ("itl_p50_ms", "ITL p50, ms"),
    ("itl_p99_ms", "ITL p99, ms"),
)


def load(path: Path) -> Record:
    """Return what an earlier run of this commit on such a machine wrote, else an empty record."""
    if not path.exists():
        return Record()
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if written["commit"] != commit() or written["machine"]["cpu"] != machine()["cpu"]:
        return Record()
    return Record(written["rounds"])


def mean(record: Record, workload: str, mode: str, figure: str) -> float | None:
    """Return the mean over the rounds, None if it was not measured: a goodput counts arrivals, few in each round."""
    values = [one[figure] for one in record.rounds.get(workload, {}).get(mode, ()) if figure in one]
    return statistics.fmean(values) if values else None


def rows_of(record: Record) -> list[list[str]]:
    """Return a row for each figure of each rate; the last column is auto by the better of the others (goodput)."""
    rows = []
    for workload in WORKLOADS:
        for figure, text in FIGURES:
            by_mode = {mode: mean(record, workload, mode, figure) for mode in FLAGS}
            if any(value is not None for value in by_mode.values()):
                label = f"{workload.partition('-')[2]} requests/s: {text}"
                ratio = _share_of_better(by_mode) if figure == GOODPUT else None
                rows.append([label, *(shown(by_mode[mode]) for mode in FLAGS), shown(ratio)])
    return rows


def is_complete(record: Record) -> bool:
    """Return whether every rate was run in every mode."""
    return all(set(record.rounds.get(name, {})) == set(FLAGS) for name in WORKLOADS)


def write_json(path: Path, record: Record) -> None:
    """Write all figures of all rounds, with the machine and the commit."""
    written = {"commit": commit(), "machine": machine(), "rounds": record.rounds, "notes": record.notes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def print_table(record: Record) -> None:
    """Print the means, then the notes."""
    console = Console(width=110)
    table = Table(title="means of the rounds")
    for place, title in enumerate(_head()):
        table.add_column(title, justify="right" if place else "left")
    for row in rows_of(record):
        table.add_row(*row)
    console.print(table)
    for note in record.notes:
        console.print(note, highlight=False)


def write_document(record: Record, file: Path = PERFORMANCE) -> bool:
    """Rewrite the table of the documents if the record is complete; return whether it was."""
    if not is_complete(record):
        return False
    num_rounds = min(len(rounds) for by_mode in record.rounds.values() for rounds in by_mode.values())
    about = machine()
    told = f"{about['cpu']}, {about['cores']} cores, commit {commit()}, means of at least {num_rounds} rounds:\n\n"
    rewrite(file, MARKER, told + markdown(_head(), rows_of(record)))
    return True


def tell_progress(workload: str, mode: str, found: Figures) -> None:
    """Say what has just been measured, beside the output."""
    told = ", ".join(f"{name} {shown(value)}" for name, value in found.items())
    Console(stderr=True, width=200).print(f"{workload}: {mode}: {told}", highlight=False)


def _head() -> list[str]:
    return ["", *FLAGS, "auto / better of both"]


def _share_of_better(by_mode: Mapping[str, float | None]) -> float | None:
    auto, others = by_mode[AUTO], [value for mode in (ALWAYS, NEVER) if (value := by_mode[mode]) is not None]
    return auto / max(others) if auto is not None and others and max(others) else None
