"""`tandem doctor`: what this machine offers, and what is missing for what."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.table import Table

from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from common.settings.parse import parse
from common.settings.readers import boolean
from common.settings.setting import setting
from tandem.console import say, table_console
from tandem.doctor.finding import Finding, Verdict
from tandem.doctor.hardware import look_at_hardware
from tandem.doctor.software import look_at_software, look_at_transports
from tandem.invocation import invocation

STYLES = {Verdict.OK: "green", Verdict.OPTIONAL: "yellow", Verdict.MISSING: "red"}


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Show what this machine offers. The exit code is 0 if `tandem up` can work here.

    --json prints {"ok": bool, "findings": [{"name", "value", "verdict": "ok" | "optional" | "missing", "advice"}]}.
    """

    json: bool = setting(False, "print JSON", boolean)


class DoctorReport(msgspec.Struct, frozen=True):
    """All findings; `ok`: nothing that `tandem up` needs is missing."""

    ok: bool
    findings: tuple[Finding, ...]


def run(argv: Sequence[str]) -> int:
    """Print the findings; non-zero if `tandem up` cannot work."""
    settings = parse(DoctorSettings, argv, os.environ, "tandem doctor")
    report = examine()
    if settings.json:
        say(msgspec.json.encode(report).decode())
    else:
        _show(report)
    return EXIT_OK if report.ok else EXIT_FAILURE


def examine() -> DoctorReport:
    """Return what there is on this machine."""
    hardware = tuple(look_at_hardware())
    has_gpu = any(finding.name == "gpu" and finding.verdict is Verdict.OK for finding in hardware)
    findings = (*hardware, *look_at_software(), *look_at_transports(has_gpu=has_gpu))
    return DoctorReport(all(finding.verdict is not Verdict.MISSING for finding in findings), findings)


def _show(report: DoctorReport) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in report.findings:
        style = STYLES[finding.verdict]
        table.add_row(finding.name, f"[{style}]{finding.verdict}[/{style}]", finding.value, finding.advice)
    table_console().print(table)
    say(f"\n`{invocation()} up` {'can work here' if report.ok else 'cannot work here yet'}")
