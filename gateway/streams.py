"""One request as its gateway sees it: which tokens the client has, and which worker may add to them.

A token is (request, placement, index). Only the next index is taken, only from the worker of the current placement
(token 1 also from the early copy), and only if that worker continued the very ids that were shown.

However far its reader lags, a stream holds nothing but the ids themselves and one ending: tokens that were not read yet
are read together, as one delta.
"""

import asyncio
from array import array
from dataclasses import dataclass

from common.errors import DeadlineExceeded, GenerationFailed, WorkerLost
from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import Epoch, Fingerprint, PlacementNumber, WorkerId
from common.messages.job import SUSPECT_DEATHS
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.spans import QueueSpan
from proto import worker_pb2 as pb

_BLAMELESS = {"worker_draining": LossReason.DRAINED, "displaced": LossReason.DISPLACED}
"""Codes of workers that give a placement back for reasons that have nothing to do with it."""


@dataclass(frozen=True, slots=True)
class Source:
    """One incarnation of a worker."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """The request cannot succeed anywhere."""

    code: str
    message: str


Ending = EndOfChoice | PlacementLost | PlacementFailed
StreamItem = TokenDelta | Ending


class Stream:
    """The tokens of one request and the ending of its placement; owned by the gateway's event loop.

    `max_failures`: the failure of that number ends the request. `deadline_s`: its end on the caller's clock.
    """

    def __init__(self, request: GenerateRequest, max_failures: int, deadline_s: float | None = None) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.placement = PlacementNumber(0)
        self.num_failures = 0
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
        self.shown: list[int] = []
        """Every token taken, by the client's reader or waiting for it."""
        self.is_over = False
        self._max_failures = max_failures
        self.num_deaths = 0
        """Workers of both roles that died or stalled over the request."""
        self._num_unaccepted_deaths = 0
        self._may_have_killed = False
        self._chains = array("Q", [EMPTY_CHAIN])
        self._num_read = 0
        self._num_shown_before = 0
        self._num_cached_tokens: int | None = None
        self._ending: Ending | None = None
        self._error: GenerationFailed | None = None
        self._is_unwanted = False
        self._has_news = asyncio.Event()
        self._settled = asyncio.Event()
        self._queued: QueueSpan | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin_placement(self) -> None:
        """Start the next placement; what the old one still says is outdated from now on."""
        self.placement = PlacementNumber(self.placement + 1)
        self.source = None
        self.target = None
        self._may_have_killed = False
        self._num_shown_before = len(self.shown)
        self._ending = None
        if self._error is None:
            self._settled.clear()
        self.leave_queue("placement_lost")
        self._queued = QueueSpan(self.request, self.placement)

    def end_choice(self) -> None:
        """Nobody needs more of the answer."""
        self._is_unwanted = True
        self._has_news.set()
        self._settled.set()

    async def next(self) -> StreamItem | None:
        """Wait for the tokens that were not read yet, else for the ending of the current placement; raise what the
        request was ended by. None: nobody needs more."""
        while not self._is_unwanted:
            if self._num_read < len(self.shown):
                return self._read()
            self.raise_if_ended()
            if self._ending is not None:
                return self._ending
            self._has_news.clear()
            await self._has_news.wait()
        return None

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
    def is_suspect(self) -> bool:
        """Whether workers died over this request so often that it must run alone."""
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def avoided(self) -> set[Source]:
        """Workers that the current placement must not go to."""
        return self.leaving if self.displacer is None else {*self.leaving, self.displacer}

    @property
    def num_own_tokens(self) -> int:
        """Tokens that came from the current placement."""
        return len(self.shown) - self._num_shown_before

    def finished_by_shown(self) -> EndOfChoice | None:
        """Return the end of the answer if the shown tokens are all of it (only the terminal event was lost)."""
        sampling = self.request.sampling
        if self.shown and self.shown[-1] in sampling.stop_ids and len(self.shown) > sampling.min_tokens:
            return self._end(FinishReason.STOP)
        if len(self.shown) >= sampling.max_tokens:
            return self._end(FinishReason.LENGTH)
        return None

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
        """Take the loss of the current placement into account; raises `WorkerLost` if it was one failure too many."""
        if loss.reason is LossReason.DRAINED and self.source is not None:
            self.leaving.add(self.source)
        self.displacer = self.source if loss.reason is LossReason.DISPLACED else None
        if loss.is_failure and self.source is None:
            self._fail_unaccepted(loss.text)
        elif loss.is_failure:
            self._fail(loss.text, is_death=loss.reason in (LossReason.LOST, LossReason.STALLED))
        self.raise_if_ended()

    def end(self, error: GenerationFailed) -> None:
        """End the request, whatever its placement does; an answer that is complete stays one."""
        if self._error is None and not isinstance(self._ending, EndOfChoice):
            self._error = error
            self._has_news.set()
            self._settled.set()

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
        if event.placement != self.placement or self.is_over or self._error is not None:
            return False
        match event.WhichOneof("event"):
            case "accepted":
                return self._take_accepted(source)
            case "tokens" if event.tokens.is_early:
                self._take_early(event.tokens)
                return True
            case "failed" if self._may_decline(source):
                self.source = source
                self._take_failed(event.failed)
            case _ if source != self.source:
                self._give_up_unaccepted(source)
                return False
            case "tokens":
                self._take_tokens(event.tokens)
            case "finished":
                self._take_finished(event.finished)
            case "failed":
                self._take_failed(event.failed)
            case "try_lost":
                self._fail(event.try_lost.reason, is_death=True)
        return True

    def _take_accepted(self, source: Source) -> bool:
        if self.source is None and self._ending is None:
            self.source = source
            self._settled.set()
            assert self._queued is not None  # a placement has begun
            self._queued.accept(source.worker)
        return self.source == source

    def _give_up_unaccepted(self, source: Source) -> None:
        """A worker goes on with the job whose acceptance is missing. It is told to stop: an acceptance that comes yet
        must bind nobody to it."""
        if self._may_decline(source):
            self._conclude(PlacementLost(LossReason.REFUSED, "its acceptance is missing"))

    def _may_decline(self, source: Source) -> bool:
        """Whether the worker may have the job and not have accepted it: it may leave, or find that it cannot run it."""
        return self.source is None and self._ending is None and self.target in (None, source)

    def _take_early(self, tokens: pb.Tokens) -> None:
        if tokens.index == len(self.shown) and tokens.chain == self._chains[-1]:
            self._show(tokens, list(tokens.ids))

    def _take_tokens(self, tokens: pb.Tokens) -> None:
        if tokens.index > len(self.shown):
            self._conclude(PlacementLost(LossReason.REFUSED, "token frames are missing"))
            return
        num_known = len(self.shown) - tokens.index
        known = self.shown[tokens.index :]
        if tokens.chain != self._chains[tokens.index] or list(tokens.ids[:num_known]) != known[: len(tokens.ids)]:
            self._conclude(PlacementLost(LossReason.REFUSED, "the worker continued other tokens than were shown"))
            return
        new = list(tokens.ids[num_known:])
        if new:
            self._show(tokens, new)

    def _take_finished(self, finished: pb.Finished) -> None:
        if finished.num_generated != len(self.shown):
            self._conclude(PlacementLost(LossReason.REFUSED, "the last token frames are missing"))
            return
        if self._num_cached_tokens is None:
            self._num_cached_tokens = finished.num_cached_tokens
        self._conclude(self._end(FinishReason(finished.reason)))

    def _take_failed(self, failed: pb.Failed) -> None:
        if failed.code in _BLAMELESS:
            self._conclude(PlacementLost(_BLAMELESS[failed.code], failed.message, is_failure=False))
        elif failed.is_retryable:
            self._conclude(PlacementLost(LossReason.FAILED, failed.message))
        else:
            self._conclude(PlacementFailed(failed.code, failed.message))

    def _fail(self, reason: str, *, is_death: bool) -> None:
        """Use up one failure; the last one ends the request."""
        self.num_failures += 1
        self.num_deaths += is_death
        if self.num_failures >= self._max_failures:
            self.end(WorkerLost(f"the request failed {self.num_failures} times, last because {reason}"))

    def _fail_unaccepted(self, reason: str) -> None:
        """A worker died that may have had the request without having said so.

        It has most likely stood unread in a queue while another request ended that worker: its budget stays as it is,
        and a whole queue of suspects would have to take turns. Still it may be the cause, so many of these end it, too.
        """
        self._num_unaccepted_deaths += 1
        if self._num_unaccepted_deaths >= self._max_failures:
            self.end(WorkerLost(f"{self._num_unaccepted_deaths} workers were lost over the request, last: {reason}"))

    def _show(self, tokens: pb.Tokens, new: list[int]) -> None:
        if isinstance(self._ending, EndOfChoice):  # an early copy may come late
            return
        # What the first placement found stands: a later one may hit what the first one has computed.
        if self._num_cached_tokens is None and tokens.HasField("num_cached_tokens"):
            self._num_cached_tokens = tokens.num_cached_tokens
        for token_id in new:
            self._chains.append(extend_chain(self._chains[-1], token_id))
        self.shown.extend(new)
        self._has_news.set()

    def _read(self) -> TokenDelta:
        first, self._num_read = self._num_read, len(self.shown)
        return TokenDelta(first, tuple(self.shown[first:]), self._num_cached_tokens or 0)

    def _end(self, reason: FinishReason) -> EndOfChoice:
        return EndOfChoice(reason, len(self.shown), self._num_cached_tokens or 0)

    def _conclude(self, ending: Ending) -> None:
        """Note how the placement ends; only the first word counts."""
        self._ending = self._ending or ending
        self._has_news.set()
        self._settled.set()
