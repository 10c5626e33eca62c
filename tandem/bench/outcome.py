"""What became of each request of a load test, and the numbers made of all of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are seconds of one clock; `token_times_s` holds when each event with text came."""

    arrived_s: float
    ended_s: float
    token_times_s: tuple[float, ...] = ()
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first text, None if there was none."""
        return self.token_times_s[0] - self.arrived_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between one event with text and the next."""
        return [later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def per_output_token_s(self) -> float | None:
        """Mean time of a token behind the first one, None if there was none."""
        if not self.token_times_s or self.num_output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)


class Distribution(msgspec.Struct, frozen=True):
    """Seconds over requests or tokens."""

    mean: float
    p50: float
    p90: float
    p99: float


class LoadReport(msgspec.Struct, frozen=True):
    """Result of a load test; a distribution is None if nothing was measured."""

    url: str
    model: str
    concurrency: int | None
    rate: float | None
    seed: int
    requests: int
    completed: int
    errors: int
    error_messages: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Distribution | None
    inter_token_s: Distribution | None
    per_output_token_s: Distribution | None
    end_to_end_s: Distribution | None


def summarise(
    outcomes: Sequence[Outcome], *, url: str, model: str, concurrency: int | None, rate: float | None, seed: int
) -> LoadReport:
    """Return the report over all outcomes (at least one)."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max(outcome.ended_s for outcome in outcomes) - min(outcome.arrived_s for outcome in outcomes)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in good)
    return LoadReport(
        url=url,
        model=model,
        concurrency=concurrency,
        rate=rate,
        seed=seed,
        requests=len(outcomes),
        completed=len(good),
        errors=len(outcomes) - len(good),
        error_messages=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        duration_s=duration_s,
        input_tokens=sum(outcome.num_input_tokens for outcome in good),
        output_tokens=num_output_tokens,
        output_tokens_per_s=num_output_tokens / duration_s if duration_s else 0.0,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        ttft_s=distribution([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        inter_token_s=distribution([gap for outcome in good for gap in outcome.gaps_s]),
        per_output_token_s=distribution(
            [outcome.per_output_token_s for outcome in good if outcome.per_output_token_s is not None]
        ),
        end_to_end_s=distribution([outcome.ended_s - outcome.arrived_s for outcome in good]),
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return mean and percentiles, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        sum(ordered) / len(ordered), percentile(ordered, 50), percentile(ordered, 90), percentile(ordered, 99)
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, interpolated linearly between the two nearest ranks."""
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
