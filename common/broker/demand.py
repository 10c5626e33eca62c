"""What a job asks of a worker, and what it costs its tenant; both brokers order and place by this."""

from dataclasses import dataclass

from common.broker.keys import escape
from common.messages.ids import Fingerprint
from common.messages.job import Job

MAX_PRIORITY = 10
"""Priorities beyond it, up or down, are as good as this one."""

ID_BYTES = 4
"""Of one token id in a packed list."""

NUM_RANKS = 2 * MAX_PRIORITY + 1

PAID = "!"
"""Stands where a tenant stands for the jobs that were served before and lost their worker; no tenant is named so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`rank` 0 is the most urgent. `tenant` is written as in keys. `cost` is what the tenant's share is charged, by its
    `weight`.

    `num_tokens` are those that the worker has to have computed before it generates. `fingerprint` None: any version of
    the model will do.
    """

    num_blocks: int
    num_seats: int
    num_tokens: int
    cost: int
    rank: int
    tenant: str
    weight: float
    fingerprint: Fingerprint | None

    @classmethod
    def of(cls, job: Job, num_blocks: int) -> "Demand":
        """Return what a job asks for; `num_blocks` counts those of all its choices."""
        nums_shown = [len(choice.shown) // ID_BYTES for choice in job.choices]
        most = job.num_prompt_tokens + sum(max(0, job.sampling.max_tokens - shown) for shown in nums_shown)
        return cls(
            num_blocks=num_blocks,
            num_seats=len(job.choices),
            num_tokens=job.num_prompt_tokens + sum(nums_shown),
            cost=max(1, most if job.cost is None else job.cost),
            rank=MAX_PRIORITY - max(-MAX_PRIORITY, min(MAX_PRIORITY, job.priority)),
            tenant=escape(job.tenant),
            weight=job.weight,
            fingerprint=job.fingerprint,
        )
