"""One request as its gateway sees it: which of its choices go on, and which worker may add to them.

A token is (request, choice, placement, index). Only the next index of a choice is taken, only from the worker of the
current placement (the first one also from the early copy), and only if that worker continued the very ids that were
shown. A placement is of all choices that have not ended; with the last of them the request is over.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import DeadlineExceeded, GenerationFailed
from common.messages.ids import ChoiceIndex, Epoch, Fingerprint, PlacementNumber, WorkerId
from gateway.budget import FailureBudget
from gateway.choice import Choice
from gateway.choices import Choices
from gateway.engine import EndOfChoice, GenerateRequest, Tap, TokenDelta
from gateway.losses import Contradiction, LossReason, PlacementLost
from gateway.spans import QueueSpan
from proto import worker_pb2 as pb

_BLAMELESS = {"worker_draining": LossReason.DRAINED, "displaced": LossReason.DISPLACED}
"""Codes of workers that give a placement back for reasons that have nothing to do with it."""


class Source(NamedTuple):
    """One incarnation of a worker. A tuple, as it is compared with every event."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """The request cannot succeed anywhere."""

    code: str
    message: str


Ending = PlacementLost | PlacementFailed
StreamItem = TokenDelta | EndOfChoice | Ending


class Stream:
    """The choices of one request and the ending of its placement; owned by the gateway's event loop.

    `max_failures`: the failure of that number ends the request. `deadline_s`: its end on `clock`, in seconds.
    """

    def __init__(
        self,
        request: GenerateRequest,
        max_failures: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.choices = Choices(request)
        self.placement = PlacementNumber(0)
        self.budget = FailureBudget(max_failures)
        self.source: Source | None = None
        """The worker that accepted the current placement."""
        self.target: Source | None = None
        """The worker in whose stream the job was put, if one had room."""
        self.leaving: set[Source] = set()
        """Workers that gave a placement back because they drain: they do not come back."""
        self.displacer: Source | None = None
        """The worker that gave the placement before back for a request that runs alone: it has no room at once."""
        self.fingerprint: Fingerprint | None = request.fingerprint
        """The version of the model that answers: one alone, as another would go on with other tokens. None: any."""
        self.unwanted: list[ChoiceIndex] = []
        """Choices of the current placement that nobody needs more of, as its worker has to hear."""
        self.is_over = False
        self.arrived_at = clock()
        self.cost: int | None = None
        """What its tenant is charged when a worker gets it; known with the first placement."""
        self.was_given = False
        """Whether some worker got it, as far as is known."""
        self._clock = clock
        self._may_have_killed = False
        self._ending: Ending | None = None
        self._error: GenerationFailed | None = None
        self._tap = request.tap
        self._has_news = asyncio.Event()
        self._is_read = False
        """Whether the reader has got everything and waits for more."""
        self._broken: Exception | None = None
        """What the tap has raised."""
        self._settled = asyncio.Event()
        self._queued: QueueSpan | None = None
        self._began_at = self._accepted_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin_placement(self) -> None:
        """Start the next placement; what the old one still says is outdated from now on."""
        self.placement = PlacementNumber(self.placement + 1)
        self.source = None
        self.target = None
        self.unwanted = []
        self._may_have_killed = False
        self.choices.begin_placement()
        self._ending = None
        if self._error is None and not self.choices.is_complete:
            self._settled.clear()
        self.leave_queue("placement_lost")
        self._queued = QueueSpan(self.request, self.placement)
        self._began_at = self._clock()

    async def next(self) -> StreamItem | None:
        """Wait for tokens or the end of a choice that were not read yet, else for the ending of the current placement;
        raise what the request was ended by, or the tap has raised. None: every choice is over."""
        while True:
            if self._broken is not None:
                raise self._broken
            if self.choices.has_news:
                return self.choices.read()
            self.raise_if_ended()
            if self.choices.is_complete:
                return None
            if self._ending is not None:
                return self._ending
            await self._wait_for_news()

    @property
    def is_awaited(self) -> bool:
        """Whether the current placement may still be accepted."""
        return not self._settled.is_set()

    async def settles_within(self, seconds: float) -> bool:
        """Wait until the current placement is accepted, lost or over; False if it is none of these in that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        except TimeoutError:
            return self._settled.is_set()
        return True

    @property
    def avoided(self) -> set[Source]:
        """Workers that the current placement must not go to."""
        return self.leaving if self.displacer is None else {*self.leaving, self.displacer}

    @property
    def is_finished(self) -> bool:
        """Whether the worker of the current placement has ended the last choice."""
        return self.choices.is_complete and self._ending is None

    def end_choice(self, index: ChoiceIndex) -> bool:
        """Nobody needs more of a choice: nothing of it is read any more. Return whether it went on."""
        went_on = self.choices.abandon(index)
        if went_on:
            self.unwanted.append(index)
            self._note_completion()
        return went_on

    def finish_shown(self) -> None:
        """End the choices of which all tokens were shown: only their terminal event was lost."""
        self.choices.finish_shown()
        self._note_completion()

    def lose(self, source: Source, loss: PlacementLost) -> None:
        """That worker is gone or stalled."""
        if source == (self.source or self.target):
            self._conclude(loss)
        elif loss.is_failure and self.is_awaited and self.target is None:
            self._may_have_killed = True  # the waiting job may have been given to it

    def leave_queue(self, error: str) -> None:
        """End the wait for acceptance without it; nothing happens if the placement was accepted."""
        if self._queued is not None:
            self._queued.end(error)

    def give_up(self, text: str) -> None:
        """Nobody has accepted the current placement; another one may do better.

        No failure, as an emptied Redis looks like this to every request at once; unless a worker died meanwhile that
        may have had the job: a request that ends workers before they can say so must not do it again and again.
        """
        self._conclude(PlacementLost(LossReason.UNACCEPTED, text, is_failure=self._may_have_killed))

    def note_loss(self, loss: PlacementLost) -> None:
        """Take the loss of the current placement into account, as one failure however many choices it had; raises
        `WorkerLost` if it was one too many."""
        if loss.reason is LossReason.DRAINED and self.source is not None:
            self.leaving.add(self.source)
        self.displacer = self.source if loss.reason is LossReason.DISPLACED else None
        if loss.is_failure and self.source is None:
            self._end_if(self.budget.fail_unaccepted(loss.text))
        elif loss.is_failure:
            is_death = loss.reason in (LossReason.LOST, LossReason.STALLED)
            self._end_if(self.budget.fail(loss.text, is_death=is_death))
        self.raise_if_ended()

    def end(self, error: GenerationFailed) -> None:
        """End the request, whatever its placement does; an answer that is complete stays one."""
        if self._error is None and not self.choices.is_complete:
            self._error = error
            self._tell_reader()
            self._settled.set()

    @property
    def num_unread_bytes(self) -> int:
        """About how much memory what its reader has not read takes."""
        return self.choices.num_unread_bytes

    def drop_unread(self, error: GenerationFailed) -> None:
        """End the request, also one whose answer is complete: nothing of it is read any more but the error."""
        self._error = self._error or error
        for choice in self.choices.all:
            self.choices.abandon(choice.index)
        self._note_completion()

    def end_after(self, seconds: float) -> None:
        """End the request in so many seconds, unless it is closed before."""
        error = DeadlineExceeded("The request's time is over.")
        if seconds <= 0:
            self.end(error)
        else:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.end, error)

    def close(self, error: str) -> None:
        """Stop all that waits; `error` is why the placement was not accepted, if it was not."""
        self.leave_queue(error)
        if self._timer is not None:
            self._timer.cancel()

    def raise_if_ended(self) -> None:
        """Raise what the request was ended by, if it was."""
        if self._error is not None:
            raise self._error

    def take(self, source: Source, event: pb.FeedEvent) -> bool:
        """Take an event from a feed; False if it is outdated and its sender should release what it holds."""
        if event.HasField("tokens"):
            return self.take_tokens(source, event.placement, event.tokens)
        if event.placement != self.placement or self.is_over or self._error is not None:
            return False
        match event.WhichOneof("event"):
            case "accepted":
                return self._take_accepted(source)
            case "failed" if self._may_decline(source):
                self.source = source
                self._take_failed(event.failed)
            case _ if not self._is_bound_to(source):
                return False
            case "finished":
                self._take_finished(event.finished)
            case "failed":
                self._take_failed(event.failed)
            case "try_lost":
                self._end_if(self.budget.fail(event.try_lost.reason, is_death=True))
        return True

    def take_tokens(self, source: Source, placement: int, tokens: pb.Tokens) -> bool:
        """Take tokens from a feed, as `take`."""
        if placement != self.placement or self.is_over or self._error is not None:
            return False
        if tokens.is_early:
            self.choices.take_early(tokens)
            self._tell_reader()
            return True
        if source != self.source and not self._is_bound_to(source):
            return False
        try:
            choice = self.choices.take(tokens)
        except Contradiction as error:
            self._refuse(error)
            return True
        if choice is not None:
            tap = self._tap
            if self._is_read and tap is not None and tap.is_open:
                self._pass_on(tap, choice)
            else:
                self.choices.queue(choice)
                self._tell_reader()
        return True

    def _take_accepted(self, source: Source) -> bool:
        if self.source is None and self._is_undecided:
            self.source, self.was_given = source, True
            self._accepted_at = self._clock()
            self._settled.set()
            assert self._queued is not None  # a placement has begun
            self._queued.accept(source.worker)
        return self.source == source

    def _is_bound_to(self, source: Source) -> bool:
        """Whether that worker has accepted the placement. One that goes on with a job whose acceptance is missing is
        told to stop: an acceptance that comes yet must bind nobody to it."""
        if source == self.source:
            return True
        if self._may_decline(source):
            self._conclude(PlacementLost(LossReason.REFUSED, "its acceptance is missing"))
        return False

    @property
    def _is_undecided(self) -> bool:
        return self._ending is None and not self.choices.is_complete

    def _may_decline(self, source: Source) -> bool:
        """Whether the worker may have the job and not have accepted it: it may leave, or find that it cannot run it."""
        return self.source is None and self._is_undecided and self.target in (None, source)

    def _pass_on(self, tap: Tap, choice: Choice) -> None:
        """Give the tap what has come of a choice: the reader has got all that was before it."""
        try:
            while True:
                item = self.choices.read_one(choice)
                assert isinstance(item, TokenDelta)  # an end is told to the reader
                tap.take(item)
                if not choice.has_news:
                    return
        except Exception as error:  # noqa: BLE001 - it is the request's, not the feed's: its reader raises it
            self._broken = error
            self._tell_reader()

    async def _wait_for_news(self) -> None:
        self._has_news.clear()
        self._is_read = True
        try:
            await self._has_news.wait()
        finally:
            self._is_read = False

    def _tell_reader(self) -> None:
        self._is_read = False
        self._has_news.set()

    def _take_finished(self, finished: pb.Finished) -> None:
        """Take the end of a choice, unless the placement has ended before."""
        if self._ending is None:
            try:
                self.choices.take_end(finished, self._accepted_at - self._began_at)
            except Contradiction as error:
                self._refuse(error)
        self._note_completion()

    def _take_failed(self, failed: pb.Failed) -> None:
        if failed.code in _BLAMELESS:
            self._conclude(PlacementLost(_BLAMELESS[failed.code], failed.message, is_failure=False))
        elif failed.is_retryable:
            self._conclude(PlacementLost(LossReason.FAILED, failed.message))
        else:
            self._conclude(PlacementFailed(failed.code, failed.message))

    def _note_completion(self) -> None:
        """With the last choice there is nothing to wait for."""
        if self.choices.is_complete:
            self._settled.set()
        self._tell_reader()

    def _end_if(self, error: GenerationFailed | None) -> None:
        if error is not None:
            self.end(error)

    def _refuse(self, error: Contradiction) -> None:
        self._conclude(PlacementLost(LossReason.REFUSED, str(error)))

    def _conclude(self, ending: Ending) -> None:
        """Note how the placement ends; only the first word counts, and none behind the last choice."""
        if not self.choices.is_complete:
            self._ending = self._ending or ending
        self._tell_reader()
        self._settled.set()
