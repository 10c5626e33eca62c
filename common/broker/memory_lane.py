"""Workers and their streams as the broker in memory keeps them, and what one call sees of their room."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.broker.memory_stream import MemoryStream
from common.messages.ids import EntryId, Epoch, WorkerId
from common.messages.job import Job
from common.messages.registry import Role, WorkerLoad, WorkerRecord


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
    """A job in a worker's stream and the blocks it reserves there."""

    job: Job
    num_blocks: int


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
    num_blocks: int
    blocks_free: int
    num_seats: int
    num_busy: int
    is_contested: bool = False

    @classmethod
    def of(cls, lane: Lane, seat: Seat, cost: float) -> "Room":
        """Return what the last beat reported less what stands in the stream."""
        held = lane.stream.values()
        return cls(
            lane,
            cost,
            seat.record.num_blocks,
            seat.figures.blocks_free - sum(entry.num_blocks for entry in held),
            seat.figures.num_seats - len(held),
            seat.figures.num_busy + len(held),
        )

    def fits(self, num_blocks: int) -> bool:
        """Whether a job may be appended now."""
        return not self.is_contested and self.blocks_free >= num_blocks and self.num_seats > 0

    def append(self, job: Job, num_blocks: int, now_s: float, expires_s: float) -> EntryId:
        """Append a job and take its room."""
        self.blocks_free -= num_blocks
        self.num_seats -= 1
        self.num_busy += 1
        self.lane.expires_s = expires_s
        return self.lane.stream.append(Held(job, num_blocks), now_s)


def cheapest(rooms: Iterable[Room], num_blocks: int, weight: float) -> Room | None:
    """Return the room that fits with the least `cost * weight` plus sequences at work; the first of equals."""
    fitting = [room for room in rooms if room.fits(num_blocks)]
    return min(fitting, key=lambda room: room.cost * weight + room.num_busy, default=None)


def contest(rooms: Iterable[Room], num_blocks: int) -> bool:
    """Keep later jobs out of the rooms that could hold this one some day; return whether any room is left."""
    is_any_left = False
    for room in rooms:
        room.is_contested = room.is_contested or room.num_blocks >= num_blocks
        is_any_left = is_any_left or not room.is_contested
    return is_any_left
