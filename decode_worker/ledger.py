"""The requests that this decode worker has accepted, and the tombstones of those cancelled before they came.

Owned by the event loop. A request has at most one live placement here; a newer one supersedes it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from common.lifecycle.timer import Timer
from common.messages.ids import ChoiceIndex, GatewayId, PlacementNumber, RequestId
from common.messages.job import Job
from common.scheduling.sequence import FinishReason, PlacementKey
from decode_worker.placing import Decision
from decode_worker.stages import Stages

MAX_TOMBSTONES = 10_000
"""A tombstone is 200 bytes; at 1,000 cancels per second they last 10 s, longer than any job is under way."""


CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Answer:
    """One choice of a placement, and what its gateway was told of it. `shown` ids (packed) were told by earlier ones.

    `first_token_s` is the time of its first token here, by the monotonic clock.
    """

    shown: bytes
    is_open: bool = True
    num_generated: int = 0
    first_token_s: float | None = None


@dataclass(eq=False, slots=True)
class Live:
    """One accepted placement. It is over when all of its answers are. `prompt` (packed ids) is set once it is here.

    `prefilling_ns` is the time since when its prompt is computed here, None while that is or was done elsewhere;
    `decoding_ns` the time of its first token. It ends with `finish`, or with the code `failure`: cancelled unless told
    otherwise. Over a suspect processes have died: it is computed beside nobody. `decision` says where its prompt was to
    be computed, once that is known.
    """

    job: Job
    answers: dict[ChoiceIndex, Answer]
    prompt: bytes | None = None
    stages: Stages = field(default_factory=Stages)
    accepted_ns: int = field(default_factory=time.time_ns)
    prefilling_ns: int | None = None
    decoding_ns: int | None = None
    num_cached: int = 0
    finish: FinishReason | None = None
    failure: str = CANCELLED
    is_suspect: bool = False
    prompt_timer: Timer | None = None
    deadline_timer: Timer | None = None
    decision: Decision | None = None

    @property
    def key(self) -> PlacementKey:
        """What the placement is called."""
        return PlacementKey(self.job.request, self.job.placement)

    @property
    def open_choices(self) -> list[ChoiceIndex]:
        """The choices that are not over, the one that leads first."""
        return [choice for choice, answer in self.answers.items() if answer.is_open]

    @property
    def is_elsewhere(self) -> bool:
        """Whether its prompt is computed by a prefill worker."""
        return self.prompt is not None and self.prefilling_ns is None and self.decoding_ns is None

    @property
    def num_generated(self) -> int:
        """Tokens of all choices, those of earlier placements included."""
        return sum(answer.num_generated for answer in self.answers.values())

    def open_answer(self, choice: ChoiceIndex) -> Answer | None:
        """Return an answer that is not over."""
        answer = self.answers.get(choice)
        return answer if answer is not None and answer.is_open else None


def _ignore(_: Live) -> None:
    """Nobody wants to know."""


class Ledger:
    """Live placements by request. `on_closed` hears of each when it ends, whatever the way out."""

    def __init__(self, on_closed: Callable[[Live], None] = _ignore) -> None:
        self._on_closed = on_closed
        self._live: dict[RequestId, Live] = {}
        self._tombstones: OrderedDict[RequestId, PlacementNumber] = OrderedDict()
        self._unwanted: OrderedDict[PlacementKey, set[ChoiceIndex]] = OrderedDict()
        """Choices that were cancelled alone, before their job came."""

    def __len__(self) -> int:
        """Return the number of live placements."""
        return len(self._live)

    def open(self, job: Job) -> Live:
        """Start a placement with the choices that are wanted; the caller has closed older ones."""
        unwanted = self._unwanted.pop(PlacementKey(job.request, job.placement), set())
        answers = {each.choice: Answer(each.shown) for each in job.choices if each.choice not in unwanted}
        live = self._live[job.request] = Live(job, answers, is_suspect=job.runs_alone)
        return live

    def find(self, request: RequestId) -> Live | None:
        """Return the live placement of a request."""
        return self._live.get(request)

    def get(self, key: PlacementKey) -> Live | None:
        """Return the live placement of that key, None if it is another or none."""
        live = self._live.get(key.request)
        return live if live is not None and live.job.placement == key.placement else None

    def close(self, key: PlacementKey) -> Live | None:
        """End a placement, for good: its job may be delivered again, but not run again. None if it was not live."""
        live = self.get(key)
        if live is None:
            return None
        for timer in (live.prompt_timer, live.deadline_timer):
            if timer is not None:
                timer.cancel()
        del self._live[key.request]
        self.bury(key.request, key.placement)
        self._on_closed(live)
        return live

    def of_gateway(self, gateway: GatewayId) -> list[Live]:
        """Return the placements of one gateway."""
        return [live for live in self._live.values() if live.job.gateway == gateway]

    def has_suspect_beside(self, live: Live) -> bool:
        """Whether another placement here has to be computed alone."""
        return any(other.is_suspect for other in self._live.values() if other is not live)

    def all(self) -> list[Live]:
        """Return every live placement."""
        return list(self._live.values())

    def bury(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remember that this placement and older ones are over, should their jobs still come."""
        newest = max(placement, self._tombstones.pop(request, placement))
        self._tombstones[request] = PlacementNumber(newest)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def bury_choice(self, key: PlacementKey, choice: ChoiceIndex) -> None:
        """Remember that this choice is not wanted, should the job of that very placement still come."""
        self._unwanted.setdefault(key, set()).add(choice)
        if len(self._unwanted) > MAX_TOMBSTONES:
            self._unwanted.popitem(last=False)

    def is_buried(self, job: Job) -> bool:
        """Whether the job was cancelled before it arrived, or each of its choices was."""
        if job.placement <= self._tombstones.get(job.request, 0):
            return True
        unwanted = self._unwanted.get(PlacementKey(job.request, job.placement))
        return unwanted is not None and unwanted.issuperset(each.choice for each in job.choices)
