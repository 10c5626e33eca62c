"""The requests that this decode worker has accepted, and the tombstones of those cancelled before they came.

Owned by the event loop. A request has at most one live placement here; a newer one supersedes it.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from common.messages.ids import GatewayId, PlacementNumber, RequestId
from common.messages.job import Job
from common.scheduling.sequence import SequenceKey

MAX_TOMBSTONES = 10_000
"""A tombstone is 200 bytes; at 1,000 cancels per second they last 10 s, longer than any job is under way."""


@dataclass(eq=False, slots=True)
class Live:
    """One accepted placement. `ids` (packed, shown tokens included) is set once the prompt is here."""

    job: Job
    ids: bytes | None = None
    accepted_ns: int = field(default_factory=time.time_ns)
    decoding_ns: int | None = None
    prompt_timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> SequenceKey:
        """The sequence of this placement."""
        return SequenceKey(self.job.request, self.job.placement)


class Ledger:
    """Live placements by request."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Live] = {}
        self._tombstones: OrderedDict[RequestId, PlacementNumber] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of live placements."""
        return len(self._live)

    def open(self, job: Job) -> Live:
        """Start a placement; the caller has closed older ones."""
        live = self._live[job.request] = Live(job)
        return live

    def find(self, request: RequestId) -> Live | None:
        """Return the live placement of a request."""
        return self._live.get(request)

    def get(self, key: SequenceKey) -> Live | None:
        """Return the live placement of that key, None if it is another or none."""
        live = self._live.get(key.request)
        return live if live is not None and live.job.placement == key.placement else None

    def close(self, key: SequenceKey) -> Live | None:
        """End a placement; None if it was not live."""
        live = self.get(key)
        if live is None:
            return None
        if live.prompt_timer is not None:
            live.prompt_timer.cancel()
        return self._live.pop(key.request)

    def of_gateway(self, gateway: GatewayId) -> list[Live]:
        """Return the placements of one gateway."""
        return [live for live in self._live.values() if live.job.gateway == gateway]

    def all(self) -> list[Live]:
        """Return every live placement."""
        return list(self._live.values())

    def bury(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remember that this placement and older ones are over, should their jobs still come."""
        newest = max(placement, self._tombstones.pop(request, placement))
        self._tombstones[request] = PlacementNumber(newest)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def is_buried(self, job: Job) -> bool:
        """Whether the job was cancelled before it arrived."""
        return job.placement <= self._tombstones.get(job.request, 0)
