"""What is concluded from how fast the waiting set empties: how long others will wait, and when to come again."""

from common.broker.policy import BrokerPolicy
from common.errors import Overloaded

FULL = "The waiting queue is full."
SHORTEST_RETRY_AFTER_S = 1.0

PAUSE = 0.1
"""Of the time that a job may wait: so long nobody asks again behind the moment at which the next one would just do.
Else, while much more comes than is served, every third one asks in vain; whoever waits is work enough for so long."""

CROWDED_S = 0.1
"""So long too many wait, once they do."""


def tokens_per_s(policy: BrokerPolicy, busy_s: float, num_tokens: float, num_jobs: float) -> float | None:
    """Return the rate, given for how long somebody waited lately and what left the waiting set for a worker meanwhile;
    None if that is too little to conclude anything from."""
    is_known = busy_s >= policy.rate_known_after_s and num_jobs >= policy.rate_known_after_jobs
    return num_tokens / busy_s if is_known else None


def crowded(policy: BrokerPolicy, wait_s: float | None) -> Overloaded:
    """Return the refusal of a job while too many wait; `wait_s`: the time until all of them have gone, if known."""
    return Overloaded(FULL, retry_after_s=_retry_after_s(policy, wait_s), lasts_s=CROWDED_S)


def heavy(policy: BrokerPolicy, wait_s: float | None) -> Overloaded:
    """Return the refusal of a job that would make too many tokens wait; a smaller one may do."""
    return Overloaded(FULL, retry_after_s=_retry_after_s(policy, wait_s))


def late(policy: BrokerPolicy, missing_s: float, limit_s: float) -> Overloaded:
    """Return the refusal of a job whose turn would come `missing_s` after the `limit_s` that it may wait."""
    text = "So much work is waiting that the request could not be begun in its time."
    return Overloaded(text, retry_after_s=_bounded(policy, missing_s), lasts_s=missing_s + PAUSE * limit_s)


def _retry_after_s(policy: BrokerPolicy, wait_s: float | None) -> float:
    return policy.retry_after_s if wait_s is None else _bounded(policy, wait_s)


def _bounded(policy: BrokerPolicy, wait_s: float) -> float:
    return min(max(wait_s, SHORTEST_RETRY_AFTER_S), policy.longest_retry_after_s)
