"""Gives requests to decode workers: whom to propose, what the job says, and what to wait for.

A first placement fails fast: whoever can be told "try again" is not kept waiting for Redis. A later one belongs to a
client that has read a part of its answer: it waits for Redis and for workers, up to `FAILOVER_WAIT_S`.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Sequence

from common.broker.backoff import backoff
from common.broker.protocols import Placed, Whereabouts
from common.errors import BrokerUnavailable, Overloaded, Unavailable, WorkerLost
from common.messages.codec import pack_ids
from common.messages.ids import GatewayId
from common.messages.job import Job
from common.messages.prefixes import ID_BYTES
from common.messages.registry import WorkerState
from common.telemetry.metrics import GatewayMetrics
from gateway.charges import Charges
from gateway.feeds import Feeds
from gateway.placement import prefixes_to_find, shortlist
from gateway.room import check_room
from gateway.roster import Roster, source_of
from gateway.streams import Source, Stream

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = 4096
"""Longer prompts travel directly to the worker that accepted the job; Redis holds small records."""

ACCEPT_CHECK_S = 1.0
MAX_CHECK_PERIODS = 4
"""So much more rarely a placement is looked for that was found waiting: hundreds that wait cost Redis and their gateway
more than those that are served, if each is looked for every second."""

MAX_UNACCEPTED_CHECKS = 5
"""So often may a placed job be neither accepted nor findable before it is placed again."""

SHORTEST_RETRY_AFTER_S, LONGEST_RETRY_AFTER_S = 1.0, 60.0

FAILOVER_WAIT_S = 30.0
"""How long a request waits for a worker while there is none: one that restarts has to load its model."""


class Placer:
    """Places the requests of one gateway. `clock` returns seconds."""

    def __init__(
        self,
        gateway: GatewayId,
        roster: Roster,
        feeds: Feeds,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
        max_queue_s: float | None = None,
    ) -> None:
        self._gateway = gateway
        self._roster = roster
        self._feeds = feeds
        self._metrics = metrics
        self._clock = clock
        self._max_queue_s = max_queue_s
        self.charges = Charges()

    async def place(self, stream: Stream) -> None:
        """Make the first placement; raises `Unavailable` at once if nobody can take it."""
        if self._roster.is_away:
            raise BrokerUnavailable("Redis does not answer.")
        if not self._serving(stream):
            raise Overloaded("no decode worker is ready to take the request", retry_after_s=2.0)
        stream.begin_placement()
        self._metrics.note_placement("first")
        try:
            await self._put(stream)
        except BrokerUnavailable:
            if stream.is_awaited:
                raise
            # It was accepted: only the answer of Redis was lost.

    async def place_again(self, stream: Stream) -> None:
        """Make another placement that continues what was shown; raises `WorkerLost` if there is no way for too long."""
        stream.begin_placement()
        self._metrics.note_placement("again")
        delays = backoff(random.random)
        give_up_at = self._clock() + FAILOVER_WAIT_S
        while True:
            try:
                await self._put(stream)
                return
            except Unavailable as error:
                if self._clock() >= give_up_at:
                    raise WorkerLost(f"the worker that held this request is gone, and {error}") from error
                logger.info("not placed yet: %s", error, extra={"request_id": stream.request.request})
            if await stream.settles_within(next(delays)):
                return  # over, or accepted: only the answer of Redis was lost

    async def await_acceptance(self, stream: Stream) -> None:
        """Return when the current placement is accepted, lost or over; make sure that it is somewhere until then."""
        num_unknown = num_placed = 0
        check_s, forsaken_s = ACCEPT_CHECK_S, 0.0
        while not await stream.settles_within(self._look_within_s(stream, check_s)):
            if stream.target is not None and not self._feeds.is_connected(stream.target):
                stream.give_up(f"{stream.target.worker} was gone before it took the request in")
                return
            where = await self._whereabouts(stream)
            if where == Whereabouts.WAITING and self._queue_left_s(stream) <= 0:
                raise self._out_of_patience(stream)
            num_placed += where == Whereabouts.PLACED
            num_unknown += where == Whereabouts.UNKNOWN
            forsaken_s = 0.0 if self._may_be_taken(stream, where) else forsaken_s + check_s
            check_s = (
                min(2 * check_s, MAX_CHECK_PERIODS * ACCEPT_CHECK_S) if where == Whereabouts.WAITING else ACCEPT_CHECK_S
            )
            if num_unknown > 1 or num_placed > MAX_UNACCEPTED_CHECKS:
                stream.give_up("no worker has accepted the request in time")
            elif forsaken_s > FAILOVER_WAIT_S:
                raise WorkerLost(f"nobody could take the request for {FAILOVER_WAIT_S:.0f} s")

    def _queue_left_s(self, stream: Stream) -> float:
        """Return how long the placement may still wait for room, infinite if only the deadline bounds that: nobody is
        sent away who was served before."""
        if self._max_queue_s is None or stream.placement > 1:
            return math.inf
        return stream.arrived_at + self._max_queue_s - self._clock()

    def _look_within_s(self, stream: Stream, check_s: float) -> float:
        """Return when to look where the placement is, in `check_s` at the latest."""
        left_s = self._queue_left_s(stream)
        return min(check_s, left_s) if left_s > 0 else check_s

    def _out_of_patience(self, stream: Stream) -> Overloaded:
        view = self._roster.view(stream.request.model)
        wait_s = view.pressure.wait_s if view is not None else None
        retry_after_s = min(max(wait_s or SHORTEST_RETRY_AFTER_S, SHORTEST_RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)
        return Overloaded(f"No worker had room within {self._max_queue_s:g} s.", retry_after_s=retry_after_s)

    def _may_be_taken(self, stream: Stream, where: str | None) -> bool:
        """Whether somebody can take the placement in, now or when others are done."""
        if where == Whereabouts.WAITING:
            return bool(self._roster.serving_workers(stream.request.model))
        return where is not None

    async def _whereabouts(self, stream: Stream) -> str | None:
        """Return where the placement is; None while Redis cannot tell: that it is away is nobody's failure."""
        view = self._roster.view(stream.request.model)
        assert view is not None  # it was placed there
        try:
            return await view.jobs.whereabouts(stream.request.request, stream.placement)
        except BrokerUnavailable:
            return None

    async def _put(self, stream: Stream) -> None:
        """Place the current placement once; repeating it is safe. Raises `Unavailable`."""
        request = stream.request
        view = self._roster.view(request.model)
        assert view is not None  # a request is only made for a model with a card
        serving = self._serving(stream)
        num_blocks = _check_room(stream, serving) if serving else 1
        candidates = self._candidates(stream)
        if request.worker is not None and not candidates:
            raise Overloaded(f"{request.worker} takes no work now", retry_after_s=1.0)
        prefixes = await prefixes_to_find(stream, candidates)
        proposed = await shortlist(view.prefixes, candidates, prefixes)
        placed = await view.jobs.place(self._job(stream), num_blocks, proposed, prefixes)
        if isinstance(placed, Placed):
            stream.target = Source(placed.worker, placed.epoch)
            stream.was_given = True
        elif request.worker is not None:  # others could take it out of the waiting set
            raise Overloaded(f"{request.worker} has no room now", retry_after_s=1.0)

    def _candidates(self, stream: Stream) -> list[WorkerState]:
        """Return who comes into question, the least loaded first. Redis takes the one with least to compute, of this
        prompt and for others; for a suspect, which waits until its worker has finished all else, the least busy one."""
        model, named = stream.request.model, stream.request.worker
        workers = self._roster.decode_workers(model)
        if named is not None:  # doubted or not: that is what it is sent for
            workers = [state for state in self._roster.open_workers(model) if state.record.worker == named]
        staying = [state for state in workers if source_of(state) not in stream.avoided]
        return _akin(stream, staying)

    def _serving(self, stream: Stream) -> list[WorkerState]:
        """Return the workers that can answer the request, now or when others are done.

        They are of one version of the model: prompt and shown tokens are ids of its tokenizer, and mean something else
        to another version's. Raises `Overloaded` if there are only others.
        """
        workers = self._roster.serving_workers(stream.request.model)
        akin = _akin(stream, workers)
        if workers and not akin:
            raise Overloaded("only workers of another version of the model are left", retry_after_s=1.0)
        return akin

    def _job(self, stream: Stream) -> Job:
        request = stream.request
        is_short = len(request.prompt_ids) * ID_BYTES <= MAX_INLINE_BYTES
        if stream.cost is None:
            stream.cost = self.charges.expected(stream)
        return Job(
            request=request.request,
            placement=stream.placement,
            gateway=self._gateway,
            model=request.model,
            num_prompt_tokens=len(request.prompt_ids),
            sampling=stream.choices.sampling,
            prompt=pack_ids(request.prompt_ids) if is_short else None,
            choices=stream.choices.to_continue,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            tracestate=request.tracestate,
            time_left_s=None if stream.deadline_s is None else max(0.0, stream.deadline_s - self._clock()),
            runs_alone=stream.budget.is_suspect,
            num_deaths=stream.budget.num_deaths,
            tenant=request.tenant,
            weight=request.weight,
            priority=request.priority,
            cost=stream.cost,
            age_s=max(0.0, self._clock() - stream.arrived_at),
            fingerprint=stream.fingerprint,
        )


def _akin(stream: Stream, workers: Sequence[WorkerState]) -> list[WorkerState]:
    return [state for state in workers if stream.fingerprint in (None, state.record.fingerprint)]


def _check_room(stream: Stream, workers: Sequence[WorkerState]) -> int:
    records = [state.record for state in workers]
    return check_room(records, len(stream.request.prompt_ids), stream.choices.nums_shown)
