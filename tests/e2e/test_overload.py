"""Five times of what a cluster can do, briefly, from three tenants through two gateways on one port.

`make bench-overload` measures the same for a minute, with the bounds that a quiet machine keeps.
"""

import random
from pathlib import Path

import pytest

from bench.overload.load import Tenant
from bench.overload.site import running_site
from bench.overload.trial import Plan, run_trial
from bench.overload.verdict import Bounds, claims

LETTERS = {"small-1": 32, "small-2": 32, "large": 20 * 32}
ANSWER_TOKENS = 32
PLAN = Plan(num_seats=8, max_queue_s=4.0, overload_s=12.0, capacity_s=9.0, warm_s=4.0, num_unloaded=5, idle_within_s=90)
BUSY_MACHINE = Bounds(on_time=0.6, refusal_p99_s=PLAN.max_queue_s + 3, share_error=0.3, rss_mib=16)
"""Tests run beside others: milliseconds say nothing here, but nobody may wait for a deadline."""

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


async def test_everybody_is_served_a_fair_share_or_refused_and_all_is_as_before_afterwards(tmp_path: Path) -> None:
    options = ("--max-sequences", str(PLAN.num_seats), "--max-queue-s", str(PLAN.max_queue_s))
    async with running_site(tmp_path, tuple(LETTERS), 2, *options) as site:
        tenants = [Tenant(name, site.keys[name], letters, ANSWER_TOKENS) for name, letters in LETTERS.items()]
        findings = await run_trial(site, tenants, PLAN, random.Random(7))
    assert [claim for claim in claims(findings, PLAN, BUSY_MACHINE) if not claim.holds] == []
    assert sum(shot.is_served for shot in findings.shots) > 0
    assert sum(not shot.is_served for shot in findings.shots) > 0
