"""Workers and their streams as the broker in memory keeps them, and what one call sees of their room."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.broker.demand import Demand
from common.broker.memory_stream import MemoryStream
from common.messages.ids import EntryId, Epoch, Fingerprint, WorkerId
from common.messages.job import Job
from common.messages.registry import Role, WorkerLoad, WorkerRecord

SEQUENCE_TOKENS = 64
"""A sequence at work weighs as much as so many tokens to compute: it takes its part of about so many steps to come."""

CROWD = 1.25
CROWD_SEQUENCES = 2
"""No prefix draws a job to a worker with more sequences than `CROWD` times the mean of its peers and these."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What placement counts with: free blocks and seats, and sequences at work."""

    blocks_free: int
    num_seats: int
    num_busy: int

    @classmethod
    def of(cls, record: WorkerRecord, load: WorkerLoad) -> "Figures":
        """Return the figures of a beat."""
        num_busy = load.num_running + load.num_waiting + load.num_reserved
        return cls(load.blocks_free, record.max_sequences - num_busy, num_busy)


@dataclass(slots=True)
class Seat:
    """A worker's seat in the registry; `former` is the epoch that had it before."""

    record: WorkerRecord
    load: WorkerLoad
    figures: Figures
    seen_s: float
    expires_s: float
    absorbed: EntryId | None
    former: Epoch | None

    def is_open_for(self, epoch: Epoch, now_s: float) -> bool:
        """Whether that incarnation may get jobs now."""
        is_ready = self.record.role is Role.DECODE and self.load.is_open
        return is_ready and self.record.epoch == epoch and now_s < self.expires_s


@dataclass(frozen=True, slots=True)
class Held:
    """A job in a worker's stream and the room it reserves there; `num_tokens` are to be computed for it."""

    job: Job
    num_blocks: int
    num_seats: int
    num_tokens: int


@dataclass(slots=True)
class Lane:
    """The stream of one incarnation of a worker."""

    worker: WorkerId
    epoch: Epoch
    expires_s: float
    stream: MemoryStream[Held] = field(default_factory=MemoryStream)


@dataclass(slots=True)
class Room:
    """What a lane that is open has left in this call."""

    lane: Lane
    cost: float
    fingerprint: Fingerprint
    num_blocks: int
    max_sequences: int
    blocks_free: int
    num_seats: int
    num_busy: int
    num_tokens: int
    is_contested: bool = False

    @classmethod
    def of(cls, lane: Lane, seat: Seat, cost: float) -> "Room":
        """Return what the last beat reported less what stands in the stream."""
        held = lane.stream.values()
        num_seats = sum(entry.num_seats for entry in held)
        return cls(
            lane,
            cost,
            seat.record.fingerprint,
            seat.record.num_blocks,
            seat.figures.num_seats + seat.figures.num_busy,
            seat.figures.blocks_free - sum(entry.num_blocks for entry in held),
            seat.figures.num_seats - num_seats,
            seat.figures.num_busy + num_seats,
            sum(entry.num_tokens for entry in held),
        )

    def fits(self, demand: Demand) -> bool:
        """Whether a job may be appended now."""
        has_room = self.blocks_free >= demand.num_blocks and self.num_seats >= demand.num_seats
        return not self.is_contested and has_room and self._is_akin(demand)

    def could_hold(self, demand: Demand) -> bool:
        """Whether the job would fit if nobody else were there."""
        is_large = self.num_blocks >= demand.num_blocks and self.max_sequences >= demand.num_seats
        return is_large and self._is_akin(demand)

    def append(self, job: Job, demand: Demand, num_uncached: int, now_s: float, expires_s: float) -> EntryId:
        """Append a job and take its room."""
        self.blocks_free -= demand.num_blocks
        self.num_seats -= demand.num_seats
        self.num_busy += demand.num_seats
        self.num_tokens += num_uncached
        self.lane.expires_s = expires_s
        return self.lane.stream.append(Held(job, demand.num_blocks, demand.num_seats, num_uncached), now_s)

    def _is_akin(self, demand: Demand) -> bool:
        return demand.fingerprint in (None, self.fingerprint)


def cheapest(rooms: Iterable[Room], demand: Demand, num_cached: Callable[[Lane], int]) -> tuple[Room, int] | None:
    """Return the room that fits with the least to compute, and how many tokens of this job; the first of equals.

    `num_cached` tells how many tokens of the job a worker has already.
    """
    fitting = [room for room in rooms if room.fits(demand)]
    if not fitting:
        return None
    crowd = CROWD * sum(room.num_busy for room in fitting) / len(fitting) + CROWD_SEQUENCES
    chosen, least = None, 0.0
    for room in fitting:
        is_drawn = len(fitting) > 1 and room.num_busy <= crowd
        num_uncached = max(0, demand.num_tokens - (num_cached(room.lane) if is_drawn else 0))
        cost = room.cost + num_uncached + room.num_tokens + SEQUENCE_TOKENS * room.num_busy
        if chosen is None or cost < least:
            chosen, least = (room, num_uncached), cost
    return chosen


def contest(rooms: Iterable[Room], demand: Demand | None) -> bool:
    """Keep later jobs out of the rooms that could hold this one some day (None: out of all); return whether any room is
    left."""
    is_any_left = False
    for room in rooms:
        room.is_contested = room.is_contested or demand is None or room.could_hold(demand)
        is_any_left = is_any_left or not room.is_contested
    return is_any_left
