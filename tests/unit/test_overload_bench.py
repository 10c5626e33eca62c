"""The bench of overload says how late it is itself, beside what it says of the gateway."""

import asyncio
import time

import pytest

from bench.overload.client import Shot
from bench.overload.lag import TICK_S, noticed_late, watched_lag
from bench.overload.load import Tenant
from bench.overload.trial import Findings, Plan
from bench.overload.verdict import Bounds, claims

BLOCKED_S = 0.2


def test_a_pause_counts_for_each_tick_that_it_lasts() -> None:
    assert noticed_late(0.0) == [0.0]
    assert noticed_late(0.012) == pytest.approx([0.012, 0.007, 0.002])


async def test_a_blocked_loop_is_seen() -> None:
    async with watched_lag() as late_s:
        await asyncio.sleep(2 * TICK_S)
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - that is what is looked for
        await asyncio.sleep(2 * TICK_S)
    assert max(late_s) >= BLOCKED_S - TICK_S
    assert sum(late > BLOCKED_S / 2 for late in late_s) >= BLOCKED_S / 2 / TICK_S - 1


def test_the_figure_of_refusals_says_how_late_the_client_was() -> None:
    shot = Shot("one", 0.0, head_s=0.020, ended_s=0.021, status=503, retry_after_s=1.0)
    findings = Findings(tenants=(Tenant("one", "key", 32, 32),), shots=[shot] * 100)
    findings.client_late_s = [0.0] * 90 + [0.013] * 10
    claim = next(claim for claim in claims(findings, Plan(1, 5.0), Bounds()) if claim.what == "refusals answer, p99")
    assert claim.measured == "20.0 ms of 100 (client late by 13.0 ms)"
    assert claim.holds
