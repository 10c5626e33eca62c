"""What the figures of a trial say: each claim with what was measured and what it may be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.overload.client import Shot
from bench.overload.trial import Findings, Plan
from tandem.bench.outcome import percentile

MIB = 1 << 20
REFUSALS = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is allowed. `share_error` is relative to a fair share, `rss_mib` is growth between the second quarter of the
    overload and its last."""

    on_time: float = 0.95
    refusal_p99_s: float = 0.050
    share_error: float = 0.10
    rss_mib: float = 4.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the result."""

    what: str
    measured: str
    allowed: str
    holds: bool


def served_in_window(findings: Findings, plan: Plan) -> list[Shot]:
    """Return what was served to its end while the overload lasted, without its first quarter."""
    begin_s = findings.began_s + plan.overload_s / 4
    end_s = findings.began_s + plan.overload_s
    return [shot for shot in findings.shots if shot.is_whole and begin_s <= (shot.ended_s or 0.0) <= end_s]


def shares(findings: Findings, plan: Plan) -> dict[str, float]:
    """Return how much of the tokens each tenant was served, relative to the same for all."""
    served = served_in_window(findings, plan)
    total = sum(shot.num_tokens for shot in served) or 1
    names = [tenant.name for tenant in findings.tenants]
    own = {name: sum(shot.num_tokens for shot in served if shot.tenant == name) for name in names}
    return {name: tokens * len(names) / total for name, tokens in own.items()}


def claims(findings: Findings, plan: Plan, bounds: Bounds) -> Iterator[Claim]:
    """Yield every claim."""
    yield _everybody_answered(findings)
    yield _on_time(findings, plan, bounds)
    refused = sorted(
        shot.head_s - shot.sent_s for shot in findings.shots if shot.status in REFUSALS and shot.head_s is not None
    )
    p99_s = percentile(refused, 99) if refused else 0.0
    allowed = f"< {bounds.refusal_p99_s * 1000:.0f} ms"
    late_s = percentile(sorted(findings.client_late_s), 99) if findings.client_late_s else 0.0
    measured = f"{p99_s * 1000:.1f} ms of {len(refused)} (client late by {late_s * 1000:.1f} ms)"
    yield Claim("refusals answer, p99", measured, allowed, p99_s < bounds.refusal_p99_s)
    are_told = all(shot.retry_after_s is not None for shot in findings.shots if shot.status in REFUSALS)
    yield Claim("refusals say when to come again", "all" if are_told else "some", "all", are_told)
    of_each = shares(findings, plan)
    worst = max(abs(share - 1) for share in of_each.values())
    told = ", ".join(f"{name} {share:.3f}" for name, share in of_each.items())
    yield Claim("shares, 1 is fair", told, f"within {bounds.share_error:.2f}", worst <= bounds.share_error)
    growth = max(map(_growth, findings.rss_bytes.values()), default=0) / MIB
    yield Claim("growth of a gateway", f"{growth:.1f} MiB", f"<= {bounds.rss_mib:.0f} MiB", growth <= bounds.rss_mib)


def _everybody_answered(findings: Findings) -> Claim:
    bad = [shot for shot in findings.shots if not (shot.is_whole or shot.status in REFUSALS)]
    kinds = sorted({f"{shot.status} {shot.code}".strip() for shot in bad})
    measured = f"{len(findings.shots) - len(bad)} of {len(findings.shots)} {', '.join(kinds)}".strip()
    return Claim("answered in order, served or refused", measured, "all", not bad)


def _on_time(findings: Findings, plan: Plan, bounds: Bounds) -> Claim:
    served = [shot for shot in findings.shots if shot.is_served]
    late = [shot for shot in served if not _is_on_time(shot, findings, plan)]
    part = 1 - len(late) / len(served) if served else 0.0
    what = f"first token within 2x unloaded + {plan.max_queue_s:g} s"
    return Claim(what, f"{part:.1%} of {len(served)}", f">= {bounds.on_time:.0%}", part >= bounds.on_time)


def _is_on_time(shot: Shot, findings: Findings, plan: Plan) -> bool:
    limit_s = 2 * findings.unloaded_ttft_s[shot.tenant] + plan.max_queue_s
    return shot.first_s is not None and shot.first_s - shot.sent_s <= limit_s


def _growth(rss_bytes: Sequence[int]) -> int:
    if len(rss_bytes) < 4:
        return 0
    second, last = len(rss_bytes) // 4, 3 * len(rss_bytes) // 4
    return max(rss_bytes[last:]) - max(rss_bytes[second : len(rss_bytes) // 2])
