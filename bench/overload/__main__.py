"""`python -m bench.overload`: five times of what a cluster can do, and whether everybody is treated as promised."""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.overload.load import Tenant
from bench.overload.site import running_site
from bench.overload.trial import Findings, Plan, run_trial
from bench.overload.verdict import Bounds, claims
from common.lifecycle.garbage import settle
from tandem.bench.outcome import percentile

SMALL_LETTERS, ANSWER_TOKENS = 32, 32
LARGER = 20


def main() -> int:
    """Run one trial and print it; 1 if something did not hold."""
    arguments = _parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = Plan(
        num_seats=arguments.seats,
        max_queue_s=arguments.max_queue_s,
        times=arguments.times,
        overload_s=arguments.seconds,
    )
    with tempfile.TemporaryDirectory(prefix="tandem-overload-") as folder:
        findings = asyncio.run(_run(Path(folder), plan, arguments))
    return _print(findings, plan)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default %(default)s)")
    parser.add_argument("--times", type=float, default=5.0, help="rate over what is sustained (default %(default)s)")
    parser.add_argument("--gateways", type=int, default=2, help="on one port (default %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="sequences in a batch (default %(default)s)")
    parser.add_argument("--max-queue-s", type=float, default=5.0, help="longest wait (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and prompts (default %(default)s)")
    return parser.parse_args()


async def _run(folder: Path, plan: Plan, arguments: argparse.Namespace) -> Findings:
    names = ("small-1", "small-2", "large")
    options = ["--max-sequences", str(plan.num_seats), "--max-queue-s", str(plan.max_queue_s)]
    async with running_site(folder, names, arguments.gateways, *options) as site:
        sizes = (SMALL_LETTERS, SMALL_LETTERS, LARGER * SMALL_LETTERS)
        tenants = [
            Tenant(name, site.keys[name], letters, ANSWER_TOKENS) for name, letters in zip(names, sizes, strict=True)
        ]
        settle()  # or the client, which is in every figure, looks through all that it has imported
        return await run_trial(site, tenants, plan, random.Random(arguments.seed))


def _print(findings: Findings, plan: Plan) -> int:
    console = Console(width=120)
    console.print(f"sustained: {findings.tokens_per_s:.0f} tokens/s of prompts and answers")
    rates = ", ".join(f"{tenant.name} {tenant.rate:.1f}/s" for tenant in findings.tenants)
    console.print(f"asked for: {plan.times:g} times that for {plan.overload_s:g} s ({rates})")
    console.print("first token, idle cluster: " + _milliseconds(findings.unloaded_ttft_s))
    console.print("first token, overloaded, p95: " + _milliseconds(_ttft_p95(findings)))
    endings = Counter((shot.tenant, shot.status, shot.code) for shot in findings.shots)
    for (tenant, status, code), count in sorted(endings.items(), key=str):
        console.print(f"  {tenant:8} {status} {code or ''} x {count}")
    table = Table("claim", "measured", "allowed", "", box=None)
    all_hold = True
    for claim in claims(findings, plan, Bounds()):
        table.add_row(claim.what, claim.measured, claim.allowed, "holds" if claim.holds else "BROKEN")
        all_hold &= claim.holds
    console.print(table)
    console.print(f"idle again, everything at baseline, after {findings.idle_after_s:.1f} s")
    return 0 if all_hold else 1


def _ttft_p95(findings: Findings) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for shot in findings.shots:
        if shot.first_s is not None:
            times.setdefault(shot.tenant, []).append(shot.first_s - shot.sent_s)
    return {name: percentile(sorted(each), 95) for name, each in sorted(times.items())}


def _milliseconds(by_tenant: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in by_tenant.items())


if __name__ == "__main__":
    sys.exit(main())
