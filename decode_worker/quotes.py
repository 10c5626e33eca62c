"""What having prompts prefilled elsewhere costs by now: what the prefill workers tell, and what we have measured of the
way between them and us. Owned by the event loop.
"""

import math
from collections.abc import Callable

from common.messages.registry import Role, StepCost, WorkerLoad
from common.runtime.peers import Peers
from common.transfer.puller import PullReport
from decode_worker.placing import Backlog, Decision, Place, There

FIRST_HANDOVER_S = 0.005
"""A hand-over in shared memory, two calls and a Redis stream, before one was measured."""

LONGEST_HANDOVER_S = 1.0
"""A hand-over that took longer met something else."""

MEMORY = 8
"""Hand-overs and pulls that count, about."""

DUE_S = 10.0
"""So long after the last prompt was sent away a short one is, to see what that costs now. A gateway's canary comes as
often to an idle worker: it is this prompt then, and proves the whole way as it should."""


class Quotes:
    """`token_bytes` are the bytes of pages per token; `clock` tells seconds."""

    def __init__(self, peers: Peers, token_bytes: int, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._token_bytes = token_bytes
        self._clock = clock
        self._handover_s = FIRST_HANDOVER_S
        self._pulled_bytes = 0.0
        self._pulled_s = 0.0
        self._last_s = -math.inf

    def there(self) -> There | None:
        """Return what the prefill workers that take work cost; None while none of them has measured a step."""
        loads = [state.load for state in self._peers.open(Role.PREFILL)]
        cost = _mean([load.step_cost for load in loads if load.step_cost is not None])
        if cost is None:
            return None
        return There(
            cost,
            len(loads),
            self._backlog(loads),
            self._token_bytes,
            self._pulled_bytes / self._pulled_s if self._pulled_s else None,
            self._handover_s,
            is_due=self._clock() - self._last_s > DUE_S,
        )

    def _backlog(self, loads: list[WorkerLoad]) -> Backlog:
        """Return what the prefill workers told. Where nobody else gives them work we know better what is left of ours:
        a heartbeat and a look at the registry may be a second late."""
        if len(self._peers.open(Role.DECODE)) < 2:
            return Backlog()
        return Backlog(sum(_num_prompts(load) for load in loads), sum(load.num_uncomputed for load in loads))

    def sent(self, decision: Decision) -> None:
        """A prompt was given away: the next probe is due later."""
        if decision.place is Place.THERE:
            self._last_s = self._clock()

    def pulled(self, report: PullReport) -> None:
        """Pages have come; the speed of the link is that of the last pulls together."""
        self._pulled_bytes += report.num_bytes - self._pulled_bytes / MEMORY
        self._pulled_s += report.duration_s - self._pulled_s / MEMORY

    def handed_over(self, decision: Decision, real_s: float) -> None:
        """A prompt's first token has come from elsewhere, `real_s` seconds after it was sent there. What was not
        expected of computing and transfer is put down to the hand-over."""
        if decision.there is not None:
            self._take(real_s - (decision.there.first_token_s - decision.handover_s))

    def missed(self, decision: Decision) -> None:
        """A prompt that was sent away was computed here in the end: that costs as much as any hand-over may."""
        if decision.place is Place.THERE:
            self._take(LONGEST_HANDOVER_S)

    def _take(self, handover_s: float) -> None:
        bounded_s = min(max(handover_s, 0.0), LONGEST_HANDOVER_S)
        self._handover_s += (bounded_s - self._handover_s) / MEMORY


def _num_prompts(load: WorkerLoad) -> int:
    return load.num_running + load.num_waiting


def _mean(costs: list[StepCost]) -> StepCost | None:
    if not costs:
        return None
    num = len(costs)
    return StepCost(
        sum(cost.base_s for cost in costs) / num,
        sum(cost.token_s for cost in costs) / num,
        sum(cost.pair_s for cost in costs) / num,
    )
