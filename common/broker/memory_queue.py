"""What the Lua scripts do, in memory: places, leases and lanes of one model. The clock is given; nothing here waits."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.broker.demand import PAID, Demand
from common.broker.keys import escape
from common.broker.memory_lane import Figures, Lane, Room, Seat, cheapest, contest
from common.broker.memory_order import WaitingOrder
from common.broker.memory_prefixes import MemoryPrefixIndex
from common.broker.memory_stream import id_parts
from common.broker.policy import BrokerPolicy
from common.broker.pressure import crowded, heavy, late, tokens_per_s
from common.broker.protocols import Candidate, Placed, QueuePressure, Waiting, Whereabouts
from common.errors import StalePlacement
from common.messages.ids import EntryId, Epoch, GatewayId, PlacementNumber, RequestId, TenantId, WorkerId
from common.messages.job import Job
from common.messages.prefixes import PromptPrefixes
from common.messages.registry import WorkerLoad, WorkerRecord, WorkerState

WINDOW = 64
"""Waiting jobs that one call looks at."""


class _State(enum.Enum):
    WAITING = enum.auto()
    PLACED = enum.auto()
    WITHDRAWN = enum.auto()


@dataclass(slots=True)
class _Place:
    """Where a placement is. `is_paid`: one of its request was given to a worker, and the tenant charged."""

    placement: PlacementNumber
    state: _State
    changed_s: float
    arrival_us: int | None = None
    is_paid: bool = False
    job: Job | None = None
    demand: Demand | None = None
    lane: Lane | None = None
    entry: EntryId | None = None
    ends_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the deadline of a waiting job has passed."""
        return self.ends_s is not None and self.ends_s <= now_s


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """The job that is being placed, and what is known of its prompt."""

    request: RequestId
    prefixes: PromptPrefixes


class MemoryQueue:
    """Owned by one `MemoryBroker`."""

    def __init__(self, clock: Callable[[], float], policy: BrokerPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._seats: dict[WorkerId, Seat] = {}
        self._lanes: dict[tuple[WorkerId, Epoch], Lane] = {}
        self._places: dict[RequestId, _Place] = {}
        self._order = WaitingOrder(clock, policy)
        self._leases: dict[GatewayId, float] = {}
        self._last_beat_s: float | None = None
        self._grace_until_s = 0.0
        self.prefixes = MemoryPrefixIndex(clock, policy)

    def beat(self, record: WorkerRecord, load: WorkerLoad) -> bool:
        """Take a beat; False: the seat belongs to another epoch that took it over."""
        now_s = self._clock()
        before = self._seats.get(record.worker)
        former = before.former if before is not None else None
        if before is not None and before.record.epoch != record.epoch:
            if former == record.epoch and now_s < before.expires_s:
                return False
            former, before = before.record.epoch, None
        lane = self._lane(record.worker, record.epoch, now_s)
        figures, absorbed = Figures.of(record, load), load.absorbed
        if absorbed is not None and before is not None and _is_outdated(absorbed, before.absorbed):
            figures, absorbed = before.figures, before.absorbed
        elif absorbed is not None:
            lane.stream.absorb(absorbed)
        lane.expires_s = now_s + self._policy.stream_ttl_s
        self.prefixes.renew(record.worker, record.epoch)
        expires_s = now_s + self._policy.worker_ttl_s
        self._seats[record.worker] = Seat(record, load, figures, now_s, expires_s, absorbed, former)
        self._keep_pulse(now_s)
        self._sweep(now_s)
        self._drain(self._rooms([Candidate(record.worker, record.epoch)], now_s), now_s)
        return True

    def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Remove a worker and its stream."""
        seat = self._seats.get(worker)
        if seat is not None and seat.record.epoch == epoch:
            del self._seats[worker]
        self._lanes.pop((worker, epoch), None)
        self.prefixes.forget(worker, epoch)

    def workers(self) -> list[WorkerState]:
        """Return the live workers."""
        now_s = self._clock()
        alive = [seat for seat in self._seats.values() if now_s < seat.expires_s]
        return [WorkerState(seat.record, seat.load, now_s - seat.seen_s) for seat in alive]

    def beat_gateway(self, gateway: GatewayId, corrections: Mapping[TenantId, int]) -> QueuePressure:
        """Renew a gateway's lease and correct what its tenants were charged."""
        now_s = self._clock()
        self._keep_pulse(now_s)
        self._leases[gateway] = now_s + self._policy.gateway_ttl_s
        self._sweep(now_s)
        for tenant, num_tokens in corrections.items():
            self._order.correct(escape(tenant), num_tokens)
        self._order.rate.tick(now_s)
        return QueuePressure(len(self._order), self._order.num_tokens, self._tokens_per_s())

    def place(
        self, job: Job, num_blocks: int, candidates: Sequence[Candidate], prefixes: PromptPrefixes
    ) -> Placed | Waiting:
        """Place a job or let it wait; see `JobQueue.place`."""
        now_s = self._clock()
        self._leases[job.gateway] = now_s + self._policy.gateway_ttl_s
        self._sweep(now_s)
        before = self._places.get(job.request)
        if before is not None and job.placement <= before.placement:
            if job.placement < before.placement or before.state is _State.WITHDRAWN:
                raise StalePlacement(job.request, job.placement)
            return self._answer(job.request)
        demand = Demand.of(job, num_blocks)
        self._order.set_weight(demand.tenant, demand.weight)
        place = _Place(job.placement, _State.WAITING, now_s, job=job, demand=demand)
        place.ends_s = None if job.time_left_s is None else now_s + job.time_left_s
        place.is_paid = before.is_paid if before is not None else job.placement > 1
        place.arrival_us = before.arrival_us if before is not None else None
        has_waited = job.request in self._order
        self._remove(job.request)
        self._bury(job.request, before, now_s)
        rooms = self._rooms(candidates, now_s)
        newcomer = _Newcomer(job.request, prefixes)
        if len(self._order) or not self._give(rooms, place, newcomer, now_s, has_waited=has_waited):
            self._park(job, place, rooms, newcomer, has_waited=has_waited)
        return self._answer(job.request)

    def withdraw(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remove a placement and older ones; leave a tombstone."""
        now_s = self._clock()
        self._sweep(now_s)
        before = self._places.get(request)
        if before is not None and before.placement > placement:
            return
        lane = self._remove(request)
        self._places[request] = _Place(placement, _State.WITHDRAWN, now_s)
        if before is not None:
            self._places[request].arrival_us, self._places[request].is_paid = before.arrival_us, before.is_paid
        if lane is not None:
            self._drain(self._rooms([Candidate(lane.worker, lane.epoch)], now_s), now_s)

    def whereabouts(self, request: RequestId, placement: PlacementNumber) -> str:
        """Return one of the `Whereabouts` constants."""
        place = self._places.get(request)
        if place is None or place.placement != placement:
            return Whereabouts.UNKNOWN
        if place.state is _State.WAITING:
            return Whereabouts.WAITING
        if place.lane is not None and place.entry is not None and self._is_readable(place.lane, place.entry):
            return Whereabouts.PLACED
        return Whereabouts.UNKNOWN

    def jobs_behind(self, worker: WorkerId, epoch: Epoch, after: EntryId | None) -> list[tuple[EntryId, Job]]:
        """Return the jobs of one incarnation behind an entry."""
        lane = self._lanes.get((worker, epoch))
        if lane is None or self._clock() >= lane.expires_s:
            return []
        return [(entry, held.job) for entry, held in lane.stream.behind(after)]

    def _answer(self, request: RequestId) -> Placed | Waiting:
        place = self._places.get(request)
        if place is None:  # its time was over at once
            return Waiting(0)
        if place.state is _State.PLACED and place.lane is not None:
            return Placed(place.lane.worker, place.lane.epoch)
        return Waiting(self._order.num_ahead(request))

    def _is_readable(self, lane: Lane, entry: EntryId) -> bool:
        seat = self._seats.get(lane.worker)
        is_alive = seat is not None and seat.record.epoch == lane.epoch and self._clock() < seat.expires_s
        is_there = self._lanes.get((lane.worker, lane.epoch)) is lane  # not one that left and came back
        return is_alive and is_there and lane.stream.get(entry) is not None

    def _lane(self, worker: WorkerId, epoch: Epoch, now_s: float) -> Lane:
        for key in [key for key, lane in self._lanes.items() if now_s >= lane.expires_s]:
            del self._lanes[key]
        return self._lanes.setdefault((worker, epoch), Lane(worker, epoch, expires_s=now_s + self._policy.stream_ttl_s))

    def _rooms(self, candidates: Iterable[Candidate], now_s: float) -> list[Room]:
        rooms = []
        for candidate in candidates:
            seat = self._seats.get(candidate.worker)
            if seat is not None and seat.is_open_for(candidate.epoch, now_s):
                lane = self._lane(candidate.worker, candidate.epoch, now_s)
                rooms.append(Room.of(lane, seat, candidate.cost))
        return rooms

    def _park(self, job: Job, place: _Place, rooms: list[Room], newcomer: _Newcomer, *, has_waited: bool) -> None:
        """Let the job wait, or raise why it must not; whoever precedes it among those who wait may move then."""
        demand, now_s = place.demand, place.changed_s
        assert demand is not None
        tenant = PAID if place.is_paid else demand.tenant
        num_waiting = len(self._order)
        if not (has_waited or place.is_paid):
            self._check_bounds(demand, job.time_left_s, rooms, now_s)
        if place.arrival_us is None:
            place.arrival_us = self._order.arrival_us(job.age_s)
        self._order.enqueue(job.request, demand, tenant, place.arrival_us, has_waited=has_waited)
        self._places[job.request] = place
        if num_waiting:
            self._drain(rooms, now_s, newcomer)

    def _check_bounds(self, demand: Demand, time_left_s: float | None, rooms: list[Room], now_s: float) -> None:
        policy, order = self._policy, self._order
        order.rate.tick(now_s)
        rate = self._tokens_per_s()
        wait_s = order.num_tokens / rate if rate else None
        if len(order) >= policy.max_waiting_requests:
            raise crowded(policy, wait_s)
        if len(order) > 0 and order.num_tokens + demand.cost > policy.max_waiting_tokens:
            raise heavy(policy, wait_s)
        num_seats = sum(room.max_sequences for room in rooms)
        if rate is None and policy.max_foreseen_s is not None and 0 < num_seats <= len(order):
            raise crowded(policy, None)
        limit_s = policy.longest_foreseen_s(time_left_s)
        if rate:
            missing_s = order.tokens_ahead(demand.rank, demand.tenant) / rate - limit_s
            if missing_s > 0:
                raise late(policy, missing_s, limit_s)

    def _tokens_per_s(self) -> float | None:
        rate = self._order.rate
        return tokens_per_s(self._policy, rate.busy_s, rate.num_tokens, rate.num_jobs)

    def _give(
        self, rooms: list[Room], place: _Place, newcomer: _Newcomer | None, now_s: float, *, has_waited: bool
    ) -> bool:
        """Append the job to the cheapest lane with room, if there is one."""
        job, demand = place.job, place.demand
        assert job is not None
        assert demand is not None

        def num_cached(lane: Lane) -> int:
            if newcomer is None or job.request != newcomer.request:
                return 0
            return self.prefixes.num_cached(lane.worker, lane.epoch, newcomer.prefixes)

        chosen = cheapest(rooms, demand, num_cached)
        if chosen is None:
            return False
        room, num_uncached = chosen
        self._order.dequeue(job.request, is_served=True)
        entry = room.append(job, demand, num_uncached, now_s, now_s + self._policy.stream_ttl_s)
        if not place.is_paid:
            self._order.charge(demand.tenant, demand.cost, has_waited=has_waited)
        if place.arrival_us is None:
            place.arrival_us = round((now_s - job.age_s) * 1e6)
        self._places[job.request] = _Place(
            job.placement, _State.PLACED, now_s, place.arrival_us, is_paid=True, lane=room.lane, entry=entry
        )
        return True

    def _drain(self, rooms: list[Room], now_s: float, newcomer: _Newcomer | None = None) -> None:
        if not any(room.num_seats > 0 for room in rooms):
            return
        passed: set[RequestId] = set()
        for number, item in enumerate(self._order.turns(passed)):
            if number == WINDOW:
                contest(rooms, None)
                return
            place = self._places[item.request]
            if not self._is_wanted(place, now_s):
                self._forget(item.request)
            elif not self._give(rooms, place, newcomer, now_s, has_waited=True):
                if not contest(rooms, place.demand):
                    return
                passed.add(item.request)

    def _remove(self, request: RequestId) -> Lane | None:
        """Take a request's placement out of the waiting set or its lane; return that lane."""
        self._order.dequeue(request, is_served=False)
        place = self._places.get(request)
        if place is None or place.lane is None or place.entry is None:
            return None
        place.lane.stream.delete(place.entry)
        return place.lane

    def _bury(self, request: RequestId, place: _Place | None, now_s: float) -> None:
        if place is not None:
            self._places[request] = _Place(
                place.placement, _State.WITHDRAWN, now_s, place.arrival_us, is_paid=place.is_paid
            )

    def _forget(self, request: RequestId) -> None:
        self._order.dequeue(request, is_served=False)
        self._places.pop(request, None)

    def _sweep(self, now_s: float) -> None:
        old_s = now_s - self._policy.record_ttl_s
        for request, place in list(self._places.items()):
            if place.changed_s > old_s and not place.is_over(now_s):
                continue
            if self._is_wanted(place, now_s):
                place.changed_s = now_s
            else:
                self._forget(request)

    def _keep_pulse(self, now_s: float) -> None:
        if self._last_beat_s is not None and now_s - self._last_beat_s > self._policy.gateway_ttl_s / 2:
            self._grace_until_s = now_s + self._policy.gateway_ttl_s
        self._last_beat_s = now_s

    def _is_wanted(self, place: _Place, now_s: float) -> bool:
        """Whether somebody still wants a waiting job: its gateway lives and its deadline has not passed."""
        if place.state is not _State.WAITING or place.job is None:
            return False
        return self._has_lease(place.job.gateway, now_s) and not place.is_over(now_s)

    def _has_lease(self, gateway: GatewayId, now_s: float) -> bool:
        return self._leases.get(gateway, 0.0) > now_s or self._grace_until_s > now_s


def _is_outdated(absorbed: EntryId, stored: EntryId | None) -> bool:
    """Whether a beat was overtaken on its way by one that knew more."""
    return stored is not None and id_parts(absorbed) < id_parts(stored)
