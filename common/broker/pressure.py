"""What is concluded from how fast the waiting set empties: how long others will wait, and when to come again."""

from common.broker.policy import BrokerPolicy
from common.errors import Overloaded

SHORTEST_RETRY_AFTER_S = 1.0


def tokens_per_s(policy: BrokerPolicy, busy_s: float, num_tokens: float, num_jobs: float) -> float | None:
    """Return the rate, given for how long somebody waited lately and what left the waiting set for a worker meanwhile;
    None if that is too little to conclude anything from."""
    is_known = busy_s >= policy.rate_known_after_s and num_jobs >= policy.rate_known_after_jobs
    return num_tokens / busy_s if is_known else None


def full(policy: BrokerPolicy, wait_s: float | None) -> Overloaded:
    """Return the refusal of a job while too much waits; `wait_s`: the time until all of it has gone, if known."""
    retry_after_s = policy.retry_after_s if wait_s is None else _bounded(policy, wait_s)
    return Overloaded("The waiting queue is full.", retry_after_s=retry_after_s)


def late(policy: BrokerPolicy, missing_s: float) -> Overloaded:
    """Return the refusal of a job whose turn would come so long after its deadline."""
    text = "So much work is waiting that the request could not be served before its deadline."
    return Overloaded(text, retry_after_s=_bounded(policy, missing_s))


def _bounded(policy: BrokerPolicy, wait_s: float) -> float:
    return min(max(wait_s, SHORTEST_RETRY_AFTER_S), policy.longest_retry_after_s)
