"""One trial: how fast an idle cluster answers, how much it can do, what it does when it is asked for five times as
much, and whether it is as before afterwards."""

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from bench.overload.client import Client, Shot
from bench.overload.lag import watched_lag
from bench.overload.load import Tenant, fire_closed, fire_one_by_one, fire_open
from bench.overload.site import MODEL, Site
from tests.support.observation import Observation

BACKLOG_PER_SEAT = 1
"""Clients per seat and tenant while it is measured how much the cluster can do: somebody of each waits all the time."""

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a trial does. `times` is by how much the rate is above what can be served; `max_queue_s` how long a request
    may wait for a worker, as the cluster was told."""

    num_seats: int
    max_queue_s: float
    times: float = 5.0
    overload_s: float = 60.0
    capacity_s: float = 15.0
    warm_s: float = 60.0
    num_unloaded: int = 15
    idle_within_s: float = 30.0


@dataclass(slots=True)
class Findings:
    """What was measured. `unloaded_ttft_s` by tenant; `rss_bytes` by gateway, once a second of the overload;
    `client_late_s`: by how much answers were noticed late, every 5 ms of it."""

    unloaded_ttft_s: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    tenants: tuple[Tenant, ...] = ()
    began_s: float = 0.0
    shots: list[Shot] = field(default_factory=list)
    rss_bytes: dict[int, list[int]] = field(default_factory=dict)
    client_late_s: list[float] = field(default_factory=list)
    idle_after_s: float = 0.0


async def run_trial(site: Site, tenants: Sequence[Tenant], plan: Plan, chance: random.Random) -> Findings:
    """Return what was measured; raises `AssertionError` if the cluster does not become idle again."""
    findings = Findings()
    client = Client(site.cluster.port, MODEL)
    async with Observation(site.cluster) as observation:
        await _measure_unloaded(client, tenants, plan, chance, findings)
        findings.tokens_per_s = await _capacity(client, tenants, plan, chance)
        await observation.until_idle(plan.idle_within_s)
        findings.tenants = tuple(_overloading(tenant, findings.tokens_per_s, len(tenants), plan) for tenant in tenants)
        await fire_open(client, findings.tenants, plan.warm_s, chance)  # what grows once has grown: pools, connections
        await observation.until_idle(plan.idle_within_s)
        watching = asyncio.create_task(_watch(site.gateways_rss(), findings.rss_bytes))
        findings.began_s = time.perf_counter()
        async with watched_lag() as findings.client_late_s:
            findings.shots = await fire_open(client, findings.tenants, plan.overload_s, chance)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        client.close()
        findings.idle_after_s = await observation.until_idle(plan.idle_within_s)
    return findings


async def _measure_unloaded(
    client: Client, tenants: Sequence[Tenant], plan: Plan, chance: random.Random, findings: Findings
) -> None:
    for tenant in tenants:
        await fire_one_by_one(client, tenant, 2, chance)  # the first ones warm up
        shots = await fire_one_by_one(client, tenant, plan.num_unloaded, chance)
        times = [shot.first_s - shot.sent_s for shot in shots if shot.first_s is not None]
        assert times, f"an idle cluster serves nobody: {shots[-1]}"
        findings.unloaded_ttft_s[tenant.name] = statistics.median(times)


async def _capacity(client: Client, tenants: Sequence[Tenant], plan: Plan, chance: random.Random) -> float:
    """Return how many tokens per second, of prompts and answers, are served while somebody of each tenant waits."""
    began_s = time.perf_counter()
    at_once = BACKLOG_PER_SEAT * plan.num_seats
    shots = await fire_closed(client, tenants, at_once, plan.capacity_s, chance)
    middle_s, end_s = began_s + plan.capacity_s / 3, began_s + plan.capacity_s
    served = [shot for shot in shots if shot.ended_s is not None and middle_s <= shot.ended_s <= end_s]
    return sum(shot.num_tokens for shot in served) / (end_s - middle_s)


def _overloading(tenant: Tenant, tokens_per_s: float, num_tenants: int, plan: Plan) -> Tenant:
    """Return the tenant asking for so many times its share of what can be served."""
    cost = tenant.num_letters + tenant.num_answer_tokens  # the vocabulary is hardly more than letters
    return dataclasses.replace(tenant, rate=plan.times * tokens_per_s / num_tenants / cost)


async def _watch(pids: Sequence[int] | dict[int, int], seen: dict[int, list[int]]) -> None:
    processes = {pid: psutil.Process(pid) for pid in pids}
    while True:
        for pid, process in processes.items():
            seen.setdefault(pid, []).append(process.memory_info().rss)
        await asyncio.sleep(LOOK_S)
