"""What the answers to a workload say."""

from collections.abc import Sequence

from bench.peers.plan import Workload
from tandem.bench.outcome import Outcome, percentile

TTFT_SLO_S = 1.0
ITL_SLO_S = 0.150

Figures = dict[str, float]


class Incomplete(Exception):
    """Some request had no answer, or not the whole one: nothing is said about the workload."""


def figures(workload: Workload, outcomes: Sequence[Outcome]) -> Figures:
    """Return the figures of one round; `outcomes` are in the order of the workload's requests, as they arrived.

    Raises `Incomplete`.
    """
    for ask, outcome in zip(workload.asks, outcomes, strict=True):
        if outcome.error is not None or outcome.num_output_tokens != ask.num_tokens or not outcome.token_times_s:
            what = outcome.error or f"{outcome.num_output_tokens} tokens instead of {ask.num_tokens}"
            raise Incomplete(f"{workload.name}: {what}")
    if workload.burst_at_s is not None:
        return _burst(workload, outcomes)
    if workload.duration_s is not None:
        return _goodput(outcomes, workload.duration_s)
    return {**_rate(outcomes), **_latencies(outcomes)}


def _rate(outcomes: Sequence[Outcome]) -> Figures:
    took_s = max(one.ended_s for one in outcomes) - min(one.arrived_s for one in outcomes)
    return {"tokens_per_s": sum(one.num_output_tokens for one in outcomes) / took_s}


def _latencies(outcomes: Sequence[Outcome]) -> Figures:
    ttfts = sorted(one.token_times_s[0] - one.arrived_s for one in outcomes)
    gaps = [gap for one in outcomes for gap in one.gaps_s]
    return {"ttft_p50_ms": 1000 * percentile(ttfts, 50), **_gap_figures(gaps)}


def _gap_figures(gaps_s: Sequence[float]) -> Figures:
    ordered = sorted(gaps_s)
    return {f"itl_p{percent}_ms": 1000 * percentile(ordered, percent) for percent in (50, 99)} if ordered else {}


def _burst(workload: Workload, outcomes: Sequence[Outcome]) -> Figures:
    """Return the prompt tokens per second of the burst until its last first token, and what the others felt of it."""
    split = next(place for place, ask in enumerate(workload.asks) if ask.at_s > 0)
    running, burst = outcomes[:split], outcomes[split:]
    begin_s = min(one.arrived_s for one in burst)
    end_s = max(one.token_times_s[0] for one in burst)
    if any(one.token_times_s[0] > begin_s for one in running):
        raise Incomplete(f"{workload.name}: a stream that is to be disturbed has not begun before the burst")
    felt = [
        later - earlier
        for one in running
        for earlier, later in zip(one.token_times_s, one.token_times_s[1:], strict=False)
        if later > begin_s and earlier < end_s
    ]
    if not felt:
        raise Incomplete(f"{workload.name}: the running streams ended before the burst")
    num_tokens = sum(len(ask.prompt) for ask in workload.asks[split:])
    gaps = {f"{name}": value for name, value in _gap_figures(felt).items()}
    running_rate = len(felt) / (end_s - begin_s)
    return {"prompt_tokens_per_s": num_tokens / (end_s - begin_s), "running_tokens_per_s": running_rate, **gaps}


def _goodput(outcomes: Sequence[Outcome], duration_s: float) -> Figures:
    good = sum(map(is_good, outcomes))
    return {"goodput_per_s": good / duration_s, "good_share": good / len(outcomes), **_latencies(outcomes)}


def is_good(outcome: Outcome) -> bool:
    """Return whether an answer met the objective: first token within a second, 99 % of its gaps below 150 ms."""
    ttft_s, gaps = outcome.ttft_s, sorted(outcome.gaps_s)
    return ttft_s is not None and ttft_s <= TTFT_SLO_S and (not gaps or percentile(gaps, 99) <= ITL_SLO_S)
