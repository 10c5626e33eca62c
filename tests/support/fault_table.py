"""What the fault matrix has measured: recovery times by cell, printed as a table and written as JSON."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One cell. `recovery_s`: the client's longest wait for text since the fault. `outcome`: tokens, or an error.
    `probe_s`: from the fault to the success of a new request."""

    fault: str
    role: str
    stage: str
    recovery_s: float | None
    outcome: str
    probe_s: float | None = None


@dataclass(frozen=True)
class Absent:
    """A cell that makes no sense, and why."""

    fault: str
    role: str
    stage: str
    reason: str


@dataclass(frozen=True)
class Target:
    """A promise with a number."""

    name: str
    measured_s: float
    allowed_s: float


class Table:
    """All that was measured in one session."""

    def __init__(self) -> None:
        self.cells: list[Measured] = []
        self.absent: list[Absent] = []
        self.targets: list[Target] = []

    def lines(self) -> list[str]:
        """Return the printed form: a row for each fault and role, a column for each stage."""
        stages = list(dict.fromkeys([cell.stage for cell in self.cells] + [cell.stage for cell in self.absent]))
        header = ["fault", "role", *stages, "median", "worst", "new request"]
        rows = [self._row(fault, role, stages) for fault, role in self._keys()]
        lines = _aligned([header, *rows])
        reasons = dict.fromkeys((cell.fault, cell.role, cell.reason) for cell in self.absent)
        lines += [f"n/a: {fault} x {role}: {reason}" for fault, role, reason in reasons]
        lines += [
            f"target: {target.name}: {target.measured_s:.2f} s of {target.allowed_s:.2f} s" for target in self.targets
        ]
        return lines

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        content = {name: [asdict(row) for row in rows] for name, rows in vars(self).items()}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def _keys(self) -> list[tuple[str, str]]:
        keys = [(cell.fault, cell.role) for cell in self.cells]
        return list(dict.fromkeys(keys + [(cell.fault, cell.role) for cell in self.absent]))

    def _row(self, fault: str, role: str, stages: Iterable[str]) -> list[str]:
        cells = [cell for cell in self.cells if (cell.fault, cell.role) == (fault, role)]
        by_stage: dict[str, list[Measured]] = defaultdict(list)
        for cell in cells:
            by_stage[cell.stage].append(cell)
        times = [cell.recovery_s for cell in cells if cell.recovery_s is not None]
        probes = [cell.probe_s for cell in cells if cell.probe_s is not None]
        middle = f"{statistics.median(times):.2f} s" if times else "-"
        worst = f"{max(times):.2f} s" if times else "-"
        probe = f"{max(probes):.2f} s" if probes else "-"
        return [fault, role, *(_cell(by_stage[stage]) for stage in stages), middle, worst, probe]


def _cell(cells: list[Measured]) -> str:
    if not cells:
        return "n/a"
    times = [cell.recovery_s for cell in cells if cell.recovery_s is not None]
    outcomes = "/".join(dict.fromkeys(cell.outcome for cell in cells))
    shown = f"{max(times):.2f} s" if times else "-"
    return shown if outcomes == "tokens" else f"{shown} {outcomes}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip() for row in rows]
