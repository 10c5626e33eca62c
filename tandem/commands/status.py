"""`tandem status`: every process of a cluster and the lengths of its queues."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from common.broker.overview import Observer, Overview
from common.errors import BrokerUnavailable, StartupError
from common.lifecycle.exit_codes import EXIT_OK
from common.settings.parse import parse
from common.settings.readers import auto, boolean, path, text
from common.settings.setting import setting
from tandem.cluster.gateway_view import view_gateways
from tandem.cluster.redis_server import shown_address
from tandem.cluster.report import HandoverReport, ProcessReport, StatusReport, report_of
from tandem.cluster.state import DEFAULT_STATE_DIR, StateDir
from tandem.console import notes, say, table_console
from tandem.invocation import invocation

HANDOVER_COLUMNS = (
    "hand-over",
    "bindings",
    "quarantined",
    "placements",
    "failovers",
    "tries",
    "stale",
    "chunks spared",
    "violations",
)
TEXT_COLUMNS = ("name", "role", "health", "address", "metrics", "hand-over")
COLUMNS = (
    "name",
    "role",
    "pid",
    "restarts",
    "health",
    "address",
    "blocks free/total",
    "cached",
    "running",
    "waiting",
    "reserved",
    "metrics",
)
NARROWEST_WITH_METRICS = 140
"""Columns of a terminal; a narrower one does without the last column."""


@dataclass(frozen=True, kw_only=True)
class StatusSettings:
    """Show every process of a cluster and the lengths of its queues.

    --json prints {"processes": [{"name", "role", "pid", "epoch", "address", "health", "kv": {"blocks_total",
    "blocks_free", "blocks_cached"}, "running", "waiting", "reserved", "steps", "restarts", "metrics", "rpc",
    "handover": {"placements", "failovers", "stale", "tries", "bindings", "quarantined", "cancelled_chunks",
    "violations"}, "trouble"}], "queues": {"waiting_jobs", "prefill_tasks"}}; what processes of a role do
    not have is null.
    """

    state_dir: Path = setting(DEFAULT_STATE_DIR, "folder that was given to `tandem up`", path)
    redis_url: str | None = setting(
        None, "ask this Redis for workers instead of a state directory", auto(text), is_shown=False
    )
    json: bool = setting(False, "print JSON", boolean)


def run(argv: Sequence[str]) -> int:
    """Print the status; raise `StartupError` if there is no cluster to show."""
    settings = parse(StatusSettings, argv, os.environ, "tandem status")
    report = asyncio.run(_read(settings))
    if settings.json:
        say(msgspec.json.encode(report).decode())
    else:
        show(report)
    return EXIT_OK


async def _read(settings: StatusSettings) -> StatusReport:
    if settings.redis_url is not None:
        overview = await _overview(settings.redis_url)
        if overview is None:
            raise StartupError(f"no usable Redis at {shown_address(settings.redis_url)}")
        return report_of(None, overview, {})
    state_dir = StateDir(settings.state_dir)
    state = state_dir.read_running()
    if state is None:
        raise StartupError(f"no cluster runs in {state_dir.path} (start one with: {invocation()} up)")
    return report_of(state, *await asyncio.gather(_overview(state.redis_url), view_gateways(state)))


async def _overview(redis_url: str) -> Overview | None:
    observer = Observer(redis_url)
    try:
        return await observer.overview()
    except BrokerUnavailable:
        return None
    finally:
        await observer.close()


def show(report: StatusReport) -> None:
    """Print the tables and the lengths of the queues."""
    console = table_console()
    columns = COLUMNS if console.width >= NARROWEST_WITH_METRICS else COLUMNS[:-1]
    console.print(_table(columns, [_row(process)[: len(columns)] for process in report.processes]))
    for process in report.processes:
        if process.trouble:
            say(f"{process.name}: {process.trouble}")
    handovers = [(process.name, process.handover) for process in report.processes if process.handover]
    if handovers:
        say("")
        console.print(_table(HANDOVER_COLUMNS, [_handover_row(name, handover) for name, handover in handovers]))
        say("")
    queues = report.queues
    if queues.waiting_jobs is None:
        notes.print("Redis does not answer: nothing is known about workers and queues")
    else:
        say(f"queues: {queues.waiting_jobs} waiting jobs, {queues.prefill_tasks} prefill tasks")


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _handover_row(name: str, handover: HandoverReport) -> tuple[str, ...]:
    return (
        name,
        _shown(handover.bindings),
        _shown(handover.quarantined),
        _shown(handover.placements),
        _shown(handover.failovers),
        _shown(handover.tries),
        _shown(handover.stale),
        _shown(handover.cancelled_chunks),
        _shown(handover.violations),
    )


def _row(process: ProcessReport) -> tuple[str, ...]:
    kv = process.kv
    return (
        process.name,
        process.role,
        _shown(process.pid),
        _shown(process.restarts),
        process.health,
        process.address,
        f"{kv.blocks_free}/{kv.blocks_total}" if kv else "",
        _shown(kv.blocks_cached if kv else None),
        _shown(process.running),
        _shown(process.waiting),
        _shown(process.reserved),
        process.metrics or "",
    )


def _shown(number: int | None) -> str:
    return "" if number is None else str(number)
