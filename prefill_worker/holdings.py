"""The bindings of a prefill worker: what it computes and holds for decode workers, each under a lease.

Owned by the event loop. `end` is the only way out: pulled, superseded, cancelled, or the lease is over.
"""

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from common.messages.ids import EntryId, PlacementNumber, RequestId, TryNumber
from common.messages.job import PrefillTask
from common.messages.registry import WorkerRecord
from common.scheduling.sequence import SequenceKey
from prefill_worker.core import Command, Release, SpanReady
from proto import worker_pb2 as pb


class Outcome(enum.StrEnum):
    """How a binding ended."""

    PREFILLED = "prefilled"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LEASE_EXPIRED = "lease_expired"


class BindingKey(NamedTuple):
    """What a binding is called: one try to prefill for a placement, whichever of its choices the sequence is."""

    request: RequestId
    placement: PlacementNumber
    try_number: TryNumber


@dataclass(eq=False, slots=True)
class Holding:
    """One binding. `wanted` are the block indices that the decode worker lacks, `shown` the generated ids that the
    client has already; `spans` feeds the announcer. The lease runs from when it is held until `expires_at`. It is
    cancelled unless something else is known about its end; `is_recorded` once the span of its prefill is, `is_computed`
    once the engine is done with it."""

    task: PrefillTask
    entry: EntryId
    author: WorkerRecord
    wanted: range
    shown: tuple[int, ...]
    lease_s: float
    expires_at: float = 0.0
    claimed_ns: int = field(default_factory=time.time_ns)
    spans: asyncio.Queue[SpanReady] = field(default_factory=asyncio.Queue)
    follower: asyncio.Task[None] | None = None
    outcome: Outcome = Outcome.CANCELLED
    is_recorded: bool = False
    is_computed: bool = False

    @property
    def key(self) -> BindingKey:
        """Our name of it."""
        return BindingKey(self.task.request, self.task.placement, self.task.try_number)

    @property
    def sequence(self) -> SequenceKey:
        """The sequence in our engine."""
        return SequenceKey(self.task.request, self.task.placement, self.task.try_number, self.task.choice)

    @property
    def binding(self) -> pb.Binding:
        """The wire name."""
        return pb.Binding(request=self.task.request, placement=self.task.placement, try_number=self.task.try_number)


def key_of(binding: pb.Binding) -> BindingKey:
    """Return our name of a binding."""
    return BindingKey(binding.request, binding.placement, binding.try_number)  # type: ignore[arg-type] # wire names


def key_for(sequence: SequenceKey) -> BindingKey:
    """Return the binding that a sequence of our engine is computed for."""
    return BindingKey(sequence.request, sequence.placement, sequence.try_number)


class Holdings:
    """All bindings of one prefill worker. `on_ended` hears of each when it ends, whatever the way out.

    Leases are measured by `clock` (seconds), which may stand still.
    """

    def __init__(
        self,
        submit: Callable[[Command], None],
        on_ended: Callable[[Holding], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit = submit
        self._on_ended = on_ended
        self._clock = clock
        self._held: dict[BindingKey, Holding] = {}
        self._binding: set[BindingKey] = set()
        self.num_made = 0
        """Bindings made so far."""
        self.num_unknown = 0
        """Renewals so far of bindings that are not held (any more)."""

    def __len__(self) -> int:
        """Return the number of bindings."""
        return len(self._held)

    @property
    def num_computing(self) -> int:
        """Bindings that keep the engine busy, those included that it has not taken up yet."""
        return sum(not holding.is_computed for holding in self._held.values())

    @contextlib.contextmanager
    def binding(self, key: BindingKey) -> Iterator[None]:
        """Count a binding as held while its author is asked: what the author says about it may overtake the answer."""
        self._binding.add(key)
        try:
            yield
        finally:
            self._binding.discard(key)

    def add(self, holding: Holding) -> bool:
        """Hold a binding that is being made; False if its author has ended it already, or it is held."""
        if holding.key not in self._binding or holding.key in self._held:
            return False
        self._held[holding.key] = holding
        holding.expires_at = self._clock() + holding.lease_s
        self.num_made += 1
        return True

    def get(self, key: BindingKey) -> Holding | None:
        """Return the binding of that name."""
        return self._held.get(key)

    def all(self) -> list[Holding]:
        """Return every binding."""
        return list(self._held.values())

    def renew(self, bindings: Iterable[pb.Binding]) -> list[pb.Binding]:
        """Extend the leases of these bindings; return those that are not held."""
        unknown = []
        for binding in bindings:
            key = key_of(binding)
            holding = self._held.get(key)
            if holding is not None:
                holding.expires_at = self._clock() + holding.lease_s
            elif key not in self._binding:
                unknown.append(binding)
        self.num_unknown += len(unknown)
        return unknown

    def end(self, key: BindingKey) -> None:
        """Let go of a binding: stop its announcer, cancel its computation, release its pages. Idempotent."""
        self._binding.discard(key)
        holding = self._held.pop(key, None)
        if holding is None:
            return
        self._submit(Release(holding.sequence))
        if holding.follower is not None and holding.follower is not asyncio.current_task():
            holding.follower.cancel()
        self._on_ended(holding)

    def end_all(self) -> None:
        """Let go of every binding: we are leaving."""
        for key in list(self._held):
            self.end(key)

    def reap(self) -> list[Holding]:
        """End and return the bindings whose lease is over."""
        now = self._clock()
        expired = [holding for holding in self._held.values() if holding.expires_at < now]
        for holding in expired:
            holding.outcome = Outcome.LEASE_EXPIRED
            self.end(holding.key)
        return expired
