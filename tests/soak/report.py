"""What a soak has found, as a table and as JSON."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.soak.soak import Findings, Options


class Report:
    """Of one soak. `folder`: where the logs are."""

    def __init__(self, options: Options, findings: Findings, folder: Path) -> None:
        self._options = options
        self._findings = findings
        self._folder = folder
        ledger = findings.ledger
        self._faults = Counter(f"{each.kind} {each.target.partition('-')[0]}" for each in ledger.disturbances)

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong."""
        return not self._findings.ledger.problems

    def lines(self) -> list[str]:
        """Return the printed form."""
        ledger, options = self._findings.ledger, self._options
        lines = [f"soak of {self._findings.duration_s:.0f} s, {self._findings.num_rounds} rounds, seed {options.seed}"]
        lines += _table("outcomes", ledger.outcomes)
        lines += _table("faults", self._faults)
        lines += ["processes: RSS in MiB, minute by minute"]
        for life in self._findings.lives:
            if life.is_long:
                rss = " ".join(f"{mib:.0f}" for mib in life.by_minute())
                lines.append(f"  {life.name:10} {life.duration_s:5.0f} s  {life.middle(3).num_files:4} files  {rss}")
        lines += [f"{len(ledger.problems)} problems"]
        for problem in ledger.problems:
            lines += [f"  at {problem.at_s} s: {problem.what}: {problem.detail}".replace("\n", "\n    ")]
        if not self.is_good:
            lines += [f"logs: {self._folder}"]
        return lines

    def content(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        ledger, options = self._findings.ledger, self._options
        return {
            "is_good": self.is_good,
            "options": asdict(options),
            "duration_s": round(self._findings.duration_s, 1),
            "num_rounds": self._findings.num_rounds,
            "outcomes": dict(ledger.outcomes),
            "right_answers": dict(ledger.entries),
            "faults": dict(self._faults),
            "disturbances": [_since(ledger.started, asdict(each)) for each in ledger.disturbances],
            "processes": [life.summary() for life in self._findings.lives],
            "problems": [asdict(problem) for problem in ledger.problems],
        }

    def write(self, path: Path) -> None:
        """Write the JSON."""
        path.write_text(json.dumps(self.content(), indent=1), encoding="utf-8")


def _table(title: str, counts: Counter[str]) -> list[str]:
    return [f"{title}:", *(f"  {count:6} {name}" for name, count in counts.most_common())]


def _since(started: float, disturbance: dict[str, Any]) -> dict[str, Any]:
    """Return it with seconds since the start."""
    over = disturbance["over"]
    times = {"began": round(disturbance["began"] - started, 1), "over": None if over is None else over - started}
    return disturbance | times
