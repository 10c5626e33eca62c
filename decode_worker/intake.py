"""Takes jobs from this worker's stream, confirms them to their gateways and hands their sequences to the engine.

Life of a job here: read -> accepted (its prompt fetched from the gateway if it is long) -> admitted -> finished,
failed, late, handed back, abandoned or cancelled. Every way out goes through `close`. A worker that leaves hands back
what it reads, and what it has not begun to compute; one whose engine has failed abandons what that engine had.
"""

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from common.broker.backoff import Retry
from common.broker.protocols import JobQueue, QueuedJob
from common.errors import BrokerUnavailable, MalformedRecord
from common.lifecycle.timer import Timer
from common.messages.codec import unpack_ids
from common.messages.ids import ChoiceIndex, EntryId, Epoch, GatewayId, PlacementNumber, RequestId, WorkerId
from common.messages.sampling import SamplingParams
from common.scheduling.sequence import PlacementKey, Sequence, SequenceKey
from decode_worker.core import Absorb, Admit, Cancel, CancelAll, Command, Leave
from decode_worker.emitter import Emitter
from decode_worker.ledger import CANCELLED, Ledger, Live
from decode_worker.limits import Limits
from decode_worker.placing import There

logger = logging.getLogger(__name__)

READ_BLOCK_S = 1.0
PROMPT_TIMEOUT_S = 5.0
"""A gateway that does not send the promised prompt in this time has given the placement up, or lost the way."""

DEADLINE_GRACE_S = 1.0
"""How long after a request's deadline its gateway, whose word counts, may cancel it before we do."""


class Intake:
    """Reads jobs until cancelled; owns the way in and the way out of the ledger."""

    def __init__(
        self,
        jobs: JobQueue,
        ledger: Ledger,
        emitter: Emitter,
        submit: Callable[[Command], None],
        drop_reception: Callable[[PlacementKey], None],
        may_go_remote: Callable[[], bool],
        there: Callable[[], There | None],
        limits: Limits,
        when_grammar_is_ready: Callable[[str, Callable[[str | None], None]], None],
        on_opened: Callable[[Live], None],
        clock: Callable[[], float],
    ) -> None:
        """`clock` (seconds) measures our patience with gateways; `on_opened` hears of every placement taken in. `there`
        tells what a prefill elsewhere costs, None where that does not matter or is not known.

        `when_grammar_is_ready` calls back when a grammar is compiled, or with the reason why it cannot be.
        """
        self._jobs = jobs
        self._ledger = ledger
        self._emitter = emitter
        self._submit = submit
        self._drop_reception = drop_reception
        self._may_go_remote = may_go_remote
        self._there = there
        self._limits = limits
        self._when_grammar_is_ready = when_grammar_is_ready
        self._on_opened = on_opened
        self._clock = clock
        self._arrivals = itertools.count()
        self._read_up_to: EntryId | None = None
        self._is_leaving = False

    async def run(self, worker: WorkerId, epoch: Epoch) -> None:
        """Read and accept jobs until cancelled."""
        retry = Retry()
        while True:
            try:
                await self._read(worker, epoch, READ_BLOCK_S)
                retry.succeed()
            except BrokerUnavailable as error:
                logger.warning("cannot read jobs: %s", error)
                await retry.pause()

    def leave(self) -> None:
        """Begin to leave: what is not computed yet is handed back at once, and so is what still comes."""
        self._is_leaving = True
        for live in self._ledger.all():
            if live.prompt is None:
                self.hand_back(live)
        self._submit(Leave())

    async def hand_back_unread(self, worker: WorkerId, epoch: Epoch) -> None:
        """Hand back what stands in our stream; nothing is placed there any more and `run` has ended."""
        self._is_leaving = True
        try:
            while await self._read(worker, epoch, 0.0):
                pass
        except BrokerUnavailable as error:
            logger.warning("cannot hand unread jobs back: %s", error)

    def accept(self, queued: QueuedJob) -> None:
        """Take one job in; duplicates, cancelled and outdated ones change nothing."""
        if self._is_wanted(queued):
            live = self._ledger.open(queued.job)
            self._on_opened(live)
            if self._is_leaving:
                self.hand_back(live)
            else:
                self._begin(live)
        self._submit(Absorb(queued.entry))

    def supply_prompt(self, request: RequestId, placement: PlacementNumber, ids: bytes) -> bool:
        """Bring the ids of an accepted job; False if that placement is not here."""
        live = self._ledger.get(PlacementKey(request, placement))
        if live is None:
            return False
        if live.prompt_timer is not None:
            live.prompt_timer.cancel()
            live.prompt_timer = None
            self._start(live, ids)
        return True

    def cancel(self, request: RequestId, placement: PlacementNumber) -> None:
        """End this placement and older ones of the request, here already or not."""
        self._ledger.bury(request, placement)
        live = self._ledger.find(request)
        if live is not None and live.job.placement <= placement:
            self.close(live.key)

    def cancel_choice(self, request: RequestId, placement: PlacementNumber, choice: ChoiceIndex) -> None:
        """End one choice of this very placement, here already or not; the others go on."""
        key = PlacementKey(request, placement)
        live = self._ledger.get(key)
        if live is None:
            self._ledger.bury_choice(key, choice)
            return
        answer = live.open_answer(choice)
        if answer is None:
            return
        is_leader = live.open_choices[0] == choice
        answer.is_open = False
        if not live.open_choices:
            live.failure = "" if live.finish else CANCELLED
            self.close(key)
            return
        if is_leader:
            self._drop_reception(key)
            if live.is_elsewhere:  # the next choice computes the prompt here
                live.prefilling_ns = time.time_ns()
        self._submit(Cancel(SequenceKey(request, placement, choice=choice)))

    def cancel_gateway(self, gateway: GatewayId) -> None:
        """End everything of a gateway that is gone."""
        for live in self._ledger.of_gateway(gateway):
            self.close(live.key)

    def hand_back(self, live: Live) -> None:
        """Give a placement to whichever worker its gateway finds next: we are leaving."""
        self._emitter.failed(live, "worker_draining", "the worker is leaving", is_retryable=True)
        self.close(live.key)

    def abandon(self, live: Live) -> None:
        """Release a placement without a word: its gateway finds this worker lost, which counts against the request."""
        live.failure = "worker_lost"
        self.close(live.key)

    def displace(self, live: Live) -> None:
        """Give a placement back that must not be here when a suspect ends this process. Of two suspects one goes."""
        self._emitter.failed(live, "displaced", "another request has to run alone here", is_retryable=True)
        self.close(live.key)

    def close(self, key: PlacementKey) -> None:
        """Release all that a placement holds here, whatever its state; idempotent."""
        self._ledger.close(key)
        self._drop_reception(key)
        self._submit(CancelAll(key))

    def _is_wanted(self, queued: QueuedJob) -> bool:
        job = queued.job
        if self._ledger.is_buried(job):
            return False
        current = self._ledger.find(job.request)
        if current is None:
            return True
        if current.job.placement >= job.placement:
            return False
        self.close(current.key)
        return True

    async def _read(self, worker: WorkerId, epoch: Epoch, block_s: float) -> int:
        """Accept what is read next; return how many jobs those were."""
        queued = await self._jobs.read(worker, epoch, self._read_up_to, block_s)
        for item in queued:
            self._read_up_to = item.entry
            self.accept(item)
        return len(queued)

    def _begin(self, live: Live) -> None:
        job = live.job
        if job.time_left_s is not None:
            if job.time_left_s <= 0:
                self._end_late(live)
                return
            live.deadline_timer = Timer(self._clock, job.time_left_s + DEADLINE_GRACE_S, partial(self._end_late, live))
        if job.prompt is None:
            self._await_prompt(live)
        else:
            self._start(live, job.prompt)

    def _end_late(self, live: Live) -> None:
        self._emitter.failed(live, "deadline_exceeded", "the request's time is over", is_retryable=False)
        self.close(live.key)

    def _await_prompt(self, live: Live) -> None:
        live.prompt_timer = Timer(self._clock, PROMPT_TIMEOUT_S, partial(self._miss_prompt, live))
        self._emitter.accepted(live, needs_prompt=True)

    def _miss_prompt(self, live: Live) -> None:
        self._emitter.failed(live, "stale", "the prompt did not come in time", is_retryable=True)
        self.close(live.key)

    def _start(self, live: Live, prompt: bytes) -> None:
        if self._ledger.has_suspect_beside(live):
            self.displace(live)
            return
        try:
            reason = self._limits.objection(live.job, prompt)
        except MalformedRecord as error:
            reason = str(error)
        if reason is not None:
            self._refuse(live, reason)
            return
        self._emitter.accepted(live, needs_prompt=False)
        grammar = live.job.sampling.grammar
        if grammar is None:
            self._admit(live, prompt)
        else:
            self._when_grammar_is_ready(grammar, partial(self._go_on, live, prompt))

    def _go_on(self, live: Live, prompt: bytes, objection: str | None) -> None:
        """Admit what has waited for its grammar, unless it is over by now."""
        if self._ledger.get(live.key) is not live:
            return
        if objection is not None:
            self._refuse(live, "the grammar cannot be compiled")  # the objection may quote it
        elif self._ledger.has_suspect_beside(live):
            self.displace(live)
        else:
            self._admit(live, prompt)

    def _admit(self, live: Live, packed: bytes) -> None:
        """Hand the choices that are open to the engine."""
        live.prompt = packed
        live.prefilling_ns = time.time_ns()  # unless it is reserved for a remote prefill
        prompt = unpack_ids(packed)
        arrival = next(self._arrivals)
        leader, *followers = (
            self._sequence(live, choice, prompt, arrival, has_lead=place == 0)
            for place, choice in enumerate(live.open_choices)
        )
        may_go_remote = self._may_go_remote()
        self._submit(Admit(leader, may_go_remote, tuple(followers), self._there() if may_go_remote else None))

    def _sequence(
        self, live: Live, choice: ChoiceIndex, prompt: list[int], arrival: int, *, has_lead: bool
    ) -> Sequence:
        job = live.job
        return Sequence(
            SequenceKey(job.request, job.placement, choice=choice),
            prompt + unpack_ids(live.answers[choice].shown),
            len(prompt),
            job.sampling if has_lead else _of_follower(job.sampling),
            arrival,
            cache_salt=job.cache_salt,
            runs_alone=job.runs_alone,
        )

    def _refuse(self, live: Live, reason: str) -> None:
        self._emitter.failed(live, "invalid_request", reason, is_retryable=False)
        self.close(live.key)


def _of_follower(sampling: SamplingParams) -> SamplingParams:
    """The logprobs of the prompt are told once, by the choice that has it computed."""
    return msgspec.structs.replace(sampling, num_prompt_logprobs=None)
