"""`tandem bench serve`: put load on a gateway and measure it."""

import asyncio
import os
import secrets
from collections.abc import Sequence

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from common.settings.parse import parse
from tandem.bench.load_client import LoadClient
from tandem.bench.outcome import Distribution, LoadReport, Outcome, summarise
from tandem.bench.settings import BenchServeSettings
from tandem.bench.workload import PlannedRequest, plan_requests
from tandem.client.default_url import default_url
from tandem.client.gateway_client import GatewayClient
from tandem.console import notes, say, table_console
from tandem.invocation import invocation


def run(argv: Sequence[str]) -> int:
    """Run `bench serve`; non-zero if a request failed."""
    match list(argv):
        case ["serve", *flags]:
            return _serve(parse(BenchServeSettings, flags, os.environ, "tandem bench serve"))
        case [] | ["-h" | "--help", *_]:
            say(f"usage: tandem bench serve [FLAGS]   (see {invocation()} bench serve --help)")
            return EXIT_OK
        case [other, *_]:
            raise StartupError(f"no benchmark {other!r}; there is: serve (see {invocation()} bench --help)")
        case _:
            raise AssertionError(argv)


def _serve(settings: BenchServeSettings) -> int:
    report = asyncio.run(_measure(settings))
    if settings.json:
        say(msgspec.json.encode(report).decode())
    else:
        _show(report)
    return EXIT_FAILURE if report.errors else EXIT_OK


async def _measure(settings: BenchServeSettings) -> LoadReport:
    url = settings.url or default_url()
    seed = secrets.randbits(48) if settings.seed is None else settings.seed
    planned = _planned(settings, seed)
    async with GatewayClient(url, settings.timeout_s, settings.api_key, settings.tls()) as client:
        model = settings.model or await client.first_model()
        await LoadClient(client, settings, model, lambda _: None).run(planned[: settings.warmup])
        outcomes = await _with_progress(client, settings, model, planned[settings.warmup :])
    concurrency = settings.concurrency or (1 if settings.rate is None else None)
    return summarise(outcomes, url=url, model=model, concurrency=concurrency, rate=settings.rate, seed=seed)


def _planned(settings: BenchServeSettings, seed: int) -> list[PlannedRequest]:
    return plan_requests(
        num_requests=settings.warmup + settings.requests,
        num_input_tokens=settings.input_tokens,
        highest_token_id=settings.highest_token_id,
        rate=settings.rate,
        seed=seed,
    )


async def _with_progress(
    client: GatewayClient, settings: BenchServeSettings, model: str, planned: Sequence[PlannedRequest]
) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        bar = progress.add_task("requests", total=len(planned))
        return await LoadClient(client, settings, model, lambda _: progress.advance(bar)).run(planned)


def _show(report: LoadReport) -> None:
    say(f"{report.completed} of {report.requests} requests completed in {report.duration_s:.2f} s ({report.model})")
    say(f"output tokens/s  {report.output_tokens_per_s:.1f}")
    say(f"requests/s       {report.requests_per_s:.2f}")
    say(f"tokens           {report.input_tokens} in, {report.output_tokens} out")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    table.add_row("time to first token", *_milliseconds(report.ttft_s))
    table.add_row("inter-token", *_milliseconds(report.inter_token_s))
    table.add_row("per output token", *_milliseconds(report.per_output_token_s))
    table.add_row("end to end", *_milliseconds(report.end_to_end_s))
    table_console().print(table)
    for message, count in report.error_messages.items():
        say(f"{count} failed: {message}")


def _milliseconds(values: Distribution | None) -> tuple[str, ...]:
    if values is None:
        return ("-",) * 4
    return tuple(f"{value * 1000:.1f}" for value in (values.mean, values.p50, values.p90, values.p99))
