"""What the Lua scripts do, in memory: places, leases and lanes of one model. The clock is given; nothing here waits."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from common.broker.memory_lane import Figures, Lane, Room, Seat, cheapest, contest
from common.broker.memory_stream import id_parts
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate, Placed, Waiting, Whereabouts
from common.errors import Overloaded, StalePlacement
from common.messages.ids import EntryId, Epoch, GatewayId, PlacementNumber, RequestId, WorkerId
from common.messages.job import Job
from common.messages.registry import WorkerLoad, WorkerRecord, WorkerState

WINDOW = 64
"""Waiting jobs that one call looks at."""


class _State(enum.Enum):
    WAITING = enum.auto()
    PLACED = enum.auto()
    WITHDRAWN = enum.auto()


@dataclass(slots=True)
class _Place:
    placement: PlacementNumber
    state: _State
    changed_s: float
    job: Job | None = None
    num_blocks: int = 0
    lane: Lane | None = None
    entry: EntryId | None = None
    ends_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the deadline of a waiting job has passed."""
        return self.ends_s is not None and self.ends_s <= now_s


class MemoryQueue:
    """Owned by one `MemoryBroker`."""

    def __init__(self, clock: Callable[[], float], policy: BrokerPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._seats: dict[WorkerId, Seat] = {}
        self._lanes: dict[tuple[WorkerId, Epoch], Lane] = {}
        self._places: dict[RequestId, _Place] = {}
        self._waiting: dict[RequestId, None] = {}  # by age; a later placement keeps it
        self._leases: dict[GatewayId, float] = {}
        self._last_beat_s: float | None = None
        self._grace_until_s = 0.0

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

    def workers(self) -> list[WorkerState]:
        """Return the live workers."""
        now_s = self._clock()
        alive = [seat for seat in self._seats.values() if now_s < seat.expires_s]
        return [WorkerState(seat.record, seat.load, now_s - seat.seen_s) for seat in alive]

    def beat_gateway(self, gateway: GatewayId) -> None:
        """Renew a gateway's lease."""
        now_s = self._clock()
        self._keep_pulse(now_s)
        self._leases[gateway] = now_s + self._policy.gateway_ttl_s
        self._sweep(now_s)

    def place(self, job: Job, num_blocks: int, candidates: Sequence[Candidate]) -> Placed | Waiting:
        """Place a job or let it wait; see `JobQueue.place`."""
        now_s = self._clock()
        self._leases[job.gateway] = now_s + self._policy.gateway_ttl_s
        self._sweep(now_s)
        before = self._places.get(job.request)
        if before is not None and job.placement <= before.placement:
            if job.placement < before.placement or before.state is _State.WITHDRAWN:
                raise StalePlacement(job.request, job.placement)
            return self._answer(job.request)
        has_age = job.request in self._waiting
        if before is not None and not has_age:
            self._remove(job.request)
        rooms = self._rooms(candidates, now_s)
        if not has_age:
            self._drain(rooms, now_s)
            room = cheapest(rooms, num_blocks, 1)
            if room is not None:
                self._append(room, job, num_blocks, now_s)
                return self._answer(job.request)
            if len(self._waiting) >= self._policy.max_waiting:
                self._bury(job.request, before, now_s)
                raise Overloaded("The waiting queue is full.", retry_after_s=self._policy.retry_after_s)
        self._waiting[job.request] = None
        ends_s = None if job.time_left_s is None else now_s + job.time_left_s
        self._places[job.request] = _Place(job.placement, _State.WAITING, now_s, job, num_blocks, ends_s=ends_s)
        if has_age:
            self._drain(rooms, now_s)
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
        return Waiting(list(self._waiting).index(request))

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

    def _append(self, room: Room, job: Job, num_blocks: int, now_s: float) -> None:
        entry = room.append(job, num_blocks, now_s, now_s + self._policy.stream_ttl_s)
        self._places[job.request] = _Place(
            job.placement, _State.PLACED, now_s, num_blocks=num_blocks, lane=room.lane, entry=entry
        )

    def _drain(self, rooms: list[Room], now_s: float) -> None:
        requests = list(islice(self._waiting, WINDOW))
        for request in requests:
            place = self._places[request]
            assert place.job is not None
            if not self._is_wanted(place, now_s):
                self._forget(request)
                continue
            room = cheapest(rooms, place.num_blocks, 0)
            if room is not None:
                del self._waiting[request]
                self._append(room, place.job, place.num_blocks, now_s)
            elif not contest(rooms, place.num_blocks):
                return
        if len(requests) == WINDOW:
            contest(rooms, 0)

    def _remove(self, request: RequestId) -> Lane | None:
        """Take a request's placement out of the waiting set or its lane; return that lane."""
        self._waiting.pop(request, None)
        place = self._places.get(request)
        if place is None or place.lane is None or place.entry is None:
            return None
        place.lane.stream.delete(place.entry)
        return place.lane

    def _bury(self, request: RequestId, place: _Place | None, now_s: float) -> None:
        if place is not None:
            self._places[request] = _Place(place.placement, _State.WITHDRAWN, now_s)

    def _forget(self, request: RequestId) -> None:
        self._waiting.pop(request, None)
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
