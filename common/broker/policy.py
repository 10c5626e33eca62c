"""How long the broker's records live and how much it holds."""

import math
from dataclasses import dataclass

FORESEEN_PART = 0.75
"""Of the longest wait; the rest is for the error of foreseeing: at five times of what could be served 15 % of those who
were let in up to the whole of it waited longer, up to an eighth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPolicy:
    """The same for every process of a cluster; both brokers take it. Defaults assume a beat every two seconds."""

    worker_ttl_s: float = 6.0
    """A worker whose last beat is older gets no jobs and is not listed."""
    gateway_ttl_s: float = 6.0
    """Waiting jobs of a gateway whose last beat is older vanish."""
    model_ttl_s: float = 60.0
    """A model without any worker for so long is unknown; longer than a restart, which is 503 and not 404."""
    card_ttl_s: float = 3600.0
    record_ttl_s: float = 120.0
    """How long a repeated place or a late withdraw of the same request is recognised."""
    task_ttl_s: float = 3600.0
    """A prefill stream to which nobody has published for so long vanishes."""
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 4_000_000
    """What waiting jobs may cost together; one job may wait alone, whatever it costs."""
    max_queue_s: float | None = None
    """Nobody should wait longer for a worker; None: as long as its deadline allows."""
    ageing_s: float = 30.0
    """So long a job waits for a newer one of the next higher priority, not longer."""
    retry_after_s: float = 1.0
    """What a refused request is told while nobody knows how fast the waiting set empties."""
    longest_retry_after_s: float = 60.0
    rate_known_after_s: float = 5.0
    """So long somebody must have waited lately (of 30 s or so), and so many jobs must have left the waiting set for a
    worker, before anybody concludes from their rate how long others will wait."""
    rate_known_after_jobs: int = 5
    max_deliveries: int = 3
    """A prefill task taken over more often than that kills its workers: it is dropped."""
    max_notices: int = 1000
    """What gateways tell each other is kept about so long: they read within milliseconds."""
    notice_ttl_s: float = 600.0
    consumer_idle_s: float = 300.0
    """A consumer without tasks that has not read for so long is removed from its group."""

    limit_window_s: float = 60.0
    """What limits per minute count; only tests have shorter minutes."""
    permit_ttl_s: float = 6.0
    """Permits that their gateway has not renewed for so long are free again."""

    @property
    def max_foreseen_s(self) -> float | None:
        """Whose wait is foreseen to be longer is refused at once."""
        return None if self.max_queue_s is None else FORESEEN_PART * self.max_queue_s

    def longest_foreseen_s(self, time_left_s: float | None) -> float:
        """Return how long a job with so much time left may have to wait, infinite if nothing bounds it."""
        return min(bound for bound in (time_left_s, self.max_foreseen_s, math.inf) if bound is not None)

    @property
    def stream_ttl_s(self) -> float:
        """Life of a worker's stream after its last beat; longer than the worker counts as alive, so that a frozen
        Redis does not lose jobs of workers that beat again at once."""
        return 10 * self.worker_ttl_s
