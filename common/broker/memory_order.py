"""The order of waiting jobs as `order.lua` has it, in memory: by priority, by fair share, by age; and how fast the
waiting set empties."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.broker.demand import PAID, Demand
from common.broker.policy import BrokerPolicy
from common.messages.ids import RequestId

MEMORY_S = 30.0
"""The past counts 1/e in the rate after this."""

ENOUGH_JOBS, QUICKEST = 50, 3.0
"""With more jobs than that to count it fades faster, up to so many times."""

Flow = tuple[int, str]
"""Rank and tenant: their jobs go in order of arrival."""


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """A waiting job."""

    arrival_us: int
    request: RequestId
    flow: Flow
    cost: int


@dataclass(slots=True)
class Rate:
    """How long somebody waited lately, and what left the waiting set for a worker meanwhile."""

    busy_s: float = 0.0
    num_tokens: float = 0.0
    num_jobs: float = 0.0
    ticked_s: float | None = None
    is_busy: bool = False

    def tick(self, now_s: float) -> None:
        """Let the past fade."""
        passed_s = max(0.0, now_s - self.ticked_s) if self.ticked_s is not None else 0.0
        fade = math.exp(-passed_s / MEMORY_S * max(1.0, min(QUICKEST, self.num_jobs / ENOUGH_JOBS)))
        self.busy_s = self.busy_s * fade + (passed_s if self.is_busy else 0.0)
        self.num_tokens *= fade
        self.num_jobs *= fade
        self.ticked_s = now_s


class WaitingOrder:
    """Owned by one `MemoryQueue`. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float], policy: BrokerPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._flows: dict[Flow, list[Item]] = {}
        self._items: dict[RequestId, Item] = {}
        self._shares: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._floor = 1
        self._last_arrival_us = 0
        self.rate = Rate()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._items)

    def __contains__(self, request: object) -> bool:
        return request in self._items

    @property
    def num_tokens(self) -> int:
        """What waits, by cost."""
        return sum(item.cost for item in self._items.values())

    def arrival_us(self, age_s: float) -> int:
        """Return when a job came: later than all before, unless it says how old it is."""
        now_us = int(self._clock() * 1e6)
        if age_s > 0:
            return now_us - round(age_s * 1e6)
        self._last_arrival_us = max(now_us, self._last_arrival_us + 1)
        return self._last_arrival_us

    def enqueue(self, request: RequestId, demand: Demand, tenant: str, arrival_us: int, *, has_waited: bool) -> None:
        """Add a job; `has_waited`: an older placement of the request stood here until just now."""
        flow = (demand.rank, tenant)
        if not has_waited and tenant != PAID and not self._is_waiting(tenant):
            others = [self._share(other) for rank, other in self._flows if rank == demand.rank and other != PAID]
            self._shares[tenant] = max(self._share(tenant), min(others, default=self._floor))
        item = self._items[request] = Item(arrival_us, request, flow, demand.cost)
        self._flows.setdefault(flow, []).append(item)
        self._flows[flow].sort()
        self._tick()

    def dequeue(self, request: RequestId, *, is_served: bool) -> None:
        """Remove a job, if it waits; `is_served`: it was given to a worker."""
        item = self._items.pop(request, None)
        if item is None:
            return
        flow = self._flows[item.flow]
        flow.remove(item)
        if not flow:
            del self._flows[item.flow]
        self._tick()
        if is_served:
            self.rate.num_tokens += item.cost
            self.rate.num_jobs += 1

    def set_weight(self, tenant: str, weight: float) -> None:
        """Let what a tenant is served count by its weight from now on."""
        self._weights[tenant] = weight

    def charge(self, tenant: str, cost: int, *, has_waited: bool) -> None:
        """Add to what a tenant was served."""
        share = self._share(tenant)
        if not has_waited and not self._is_waiting(tenant):
            share = max(share, self._floor)
        self._floor = max(self._floor, share)
        self._shares[tenant] = int(share + cost / self._weight(tenant))

    def correct(self, tenant: str, num_tokens: int) -> None:
        """Tenants are charged by estimates: take in by how many tokens one was wrong."""
        self._shares[tenant] = max(1, int(self._share(tenant) + num_tokens / self._weight(tenant)))

    def num_ahead(self, request: RequestId) -> int:
        """Return how many jobs stand before this one for sure: more urgent ones, and earlier ones of its own flow."""
        item = self._items[request]
        higher = sum(len(flow) for (rank, _), flow in self._flows.items() if rank < item.flow[0])
        return higher + self._flows[item.flow].index(item)

    def tokens_ahead(self, rank: int, tenant: str) -> int:
        """Return what is served before a newcomer, as far as that can be foreseen."""
        higher = sum(item.cost for item in self._items.values() if item.flow[0] < rank)
        equal = [flow for (other, _), flow in self._flows.items() if other == rank]
        own = sum(item.cost for item in self._flows.get((rank, tenant), ()))
        return higher + min(sum(item.cost for flow in equal for item in flow), own * len(equal))

    def turns(self, passed: set[RequestId]) -> Iterator[Item]:
        """Yield the job whose turn it is, again and again; those that have been passed over are left out."""
        while True:
            heads = [head for rank in sorted({rank for rank, _ in self._flows}) if (head := self._head(rank, passed))]
            if not heads:
                return
            yield max(heads, key=self._urgency)  # of equals the first

    def _head(self, rank: int, passed: set[RequestId]) -> Item | None:
        heads = [
            (0 if tenant == PAID else self._share(tenant), item)
            for (other, tenant), flow in self._flows.items()
            if other == rank and (item := next((item for item in flow if item.request not in passed), None))
        ]
        return min(heads)[1] if heads else None

    def _urgency(self, item: Item) -> float:
        return (self._clock() - item.arrival_us / 1e6) / self._policy.ageing_s - item.flow[0]

    def _share(self, tenant: str) -> int:
        return self._shares.get(tenant, 1)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _is_waiting(self, tenant: str) -> bool:
        return any(other == tenant for _, other in self._flows)

    def _tick(self) -> None:
        self.rate.tick(self._clock())
        self.rate.is_busy = bool(self._items)
