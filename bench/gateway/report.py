"""The figures side by side: medians over the rounds, and how the gateway compares."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.gateway.workloads import Sizes, Target
from bench.machine import commit, machine

DIRECT = "no router"
GATEWAY = "tandem"

ROWS = (
    ("fast", "events_per_s", "SSE token events/s"),
    ("fast", "tokens_per_s", "tokens/s"),
    ("fast", "cpu_us_per_event", "CPU per event, us"),
    ("paced", "events_per_s", "paced: events/s"),
    ("paced", "cpu_us_per_event", "paced: CPU per event, us"),
    ("paced", "late_p50_ms", "paced: event late, p50, ms"),
    ("paced", "late_p99_ms", "paced: event late, p99, ms"),
    ("paced", "rss_mib", "paced: RSS, MiB"),
    ("lone", "ttft_p50_ms", "one stream: TTFT p50, ms"),
    ("short", "requests_per_s", "short requests/s"),
    ("short", "cpu_us_per_request", "CPU per short request, us"),
    ("breaks", "notice_ms", "client gone while nothing flows: known after, ms"),
    ("breaks", "error_events", "upstream dies: error event (1) or none (0)"),
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure of the gateway; `beyond` is taken off first: "no router" (a difference), or a peer by the
    beginning of its name (a quotient)."""

    workload: str
    figure: str
    bound: float
    is_least: bool
    text: str
    beyond: str = ""


GOALS = (
    Goal("fast", "events_per_s", 80_000, True, "events/s, detokenised and searched for stop strings"),
    Goal("paced", "late_p99_ms", 15, False, "ms added at p99 to 1,000 streams of 20 ms per token", DIRECT),
    Goal("paced", "cpu_us_per_event", 20, False, "us CPU per paced event"),
    Goal("paced", "rss_mib", 200, False, "MiB with 1,000 streams"),
    Goal("lone", "ttft_p50_ms", 0.5, False, "ms added to the first token of one stream, p50", DIRECT),
    Goal("short", "requests_per_s", 4000, True, "short requests/s"),
    Goal("breaks", "notice_ms", 50, False, "ms until a client is missed that left while nothing flows"),
    Goal("breaks", "error_events", 1, True, "streams told of the death behind them"),
    Goal("fast", "events_per_s", 0.7, True, "of vllm-router's events/s", "vllm-router"),
    Goal("paced", "late_p99_ms", 1, False, "of vllm-router's paced p99", "vllm-router"),
    Goal("fast", "events_per_s", 50, True, "times LiteLLM's events/s", "litellm"),
)


def median(target: Target, workload: str, figure: str) -> float | None:
    """Return the median over the rounds, None if it was not measured."""
    rounds = [figures[figure] for figures in target.figures.get(workload, ()) if figure in figures]
    return statistics.median(rounds) if rounds else None


def print_tables(targets: Sequence[Target], notes: Sequence[str]) -> None:
    """Print the first line that says it all, the figures, the goals, and what could not be measured."""
    console = Console(width=max(100, 34 + 20 * len(targets)))
    rate = median(_find(targets, GATEWAY), "fast", "events_per_s")
    if rate is not None:
        console.print(f"{rate:.0f} events/s", highlight=False)
    table = Table(title="medians; gateway on one core, load on another")
    table.add_column("")
    for target in targets:
        table.add_column(target.label, justify="right")
    for workload, figure, text in ROWS:
        table.add_row(text, *(_shown(median(target, workload, figure)) for target in targets))
    console.print(table)
    for line in goal_lines(targets):
        console.print(line, highlight=False)
    for note in notes:
        console.print(note, highlight=False)


def tell_progress(workload: str, target: Target) -> None:
    """Say what has just been measured, beside the output."""
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in target.figures[workload][-1].items())
    Console(stderr=True, width=200).print(f"{workload}: {target.label}: {figures}", highlight=False)


def goal_lines(targets: Sequence[Target]) -> list[str]:
    """Return one line per goal that could be judged."""
    lines = []
    for goal in GOALS:
        value = _value(targets, goal)
        if value is not None:
            is_met = value >= goal.bound if goal.is_least else value <= goal.bound
            sign = ">=" if goal.is_least else "<="
            lines.append(f"{'met   ' if is_met else 'MISSED'} {_shown(value)} {goal.text} ({sign} {goal.bound:g})")
    return lines


def write_json(path: Path, targets: Sequence[Target], sizes: Sizes, notes: Sequence[str]) -> None:
    """Write all figures of all rounds, with the machine and the commit."""
    written = {
        "commit": commit(),
        "machine": machine(),
        "sizes": asdict(sizes),
        "targets": {target.label: target.figures for target in targets},
        "goals": goal_lines(targets),
        "notes": list(notes),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


def _value(targets: Sequence[Target], goal: Goal) -> float | None:
    own = median(_find(targets, GATEWAY), goal.workload, goal.figure)
    if own is None or not goal.beyond:
        return own
    others: Mapping[str, Target] = {target.label: target for target in targets if target.label.startswith(goal.beyond)}
    for other in others.values():
        base = median(other, goal.workload, goal.figure)
        if base is not None:
            return own - base if goal.beyond == DIRECT else own / base
    return None


def _find(targets: Sequence[Target], label: str) -> Target:
    return next(target for target in targets if target.label == label)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
