"""One remote prefill as its decode worker sees it: the state that the receiver's task and the RPC handlers share.

A reception is one sequence's wait for its pages; an attempt is one try at it. Both live on the event loop.
"""

import asyncio
import enum
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.errors import PeerError
from common.messages.ids import BlockId, EntryId, Generation, TryNumber
from common.messages.registry import WorkerRecord
from common.scheduling.sequence import SequenceKey
from common.transfer.protocols import PageCopy
from decode_worker.first_token import FirstToken
from proto import worker_pb2 as pb


class TryLoss(enum.StrEnum):
    """Why a try was lost; told to gateways and in spans."""

    DIED = "died"
    """Nobody listens at the prefill worker's address, or another incarnation does."""
    UNREACHABLE = "unreachable"
    """It lives, but its pages cannot be reached from here."""
    SILENT = "silent"
    """It did not answer for most of a lease."""
    STALLED = "stalled"
    FAILED = "failed"
    """It computed no valid first token."""
    VIOLATED = "violated"
    """No token could begin the answer within its grammar; another try would find the same."""
    CORRUPT = "corrupt"
    """A page came with other bytes than it was announced with."""
    MISSED = "missed"
    """A page was reused by its owner before it was pulled."""
    REFUSED = "refused"
    """It does not hold the binding (any more): it leaves, the prompt is too long for it, or we were too late."""
    UNBOUND = "unbound"
    """Nobody has bound the task in time."""
    ABANDONED = "abandoned"
    """No prefill worker is left."""
    BROKEN = "broken"
    """A pull failed for a reason of our own."""
    OVER = "over"
    """The try is not wanted any more."""

    @property
    def is_failure(self) -> bool:
        """Whether it counts against the request's failure budget: the request may have been the cause."""
        return self in _FAILURES


_FAILURES = frozenset({TryLoss.DIED, TryLoss.SILENT, TryLoss.STALLED, TryLoss.FAILED, TryLoss.CORRUPT})


class AttemptLost(PeerError):
    """The try at hand cannot succeed any more; another one, or a local prefill, may."""

    is_retryable = True

    def __init__(self, loss: TryLoss, details: str) -> None:
        super().__init__(details)
        self.loss = loss


@dataclass(frozen=True, slots=True)
class Commit:
    """What the prefill worker brings beside the pages, and the span of its prefill."""

    first: FirstToken
    traceparent: str = ""


@dataclass(eq=False, slots=True)
class Attempt:
    """One try. `outcome` becomes the commit when it and every wanted page are here, or the reason of the loss."""

    number: TryNumber
    wanted: frozenset[int]
    outcome: asyncio.Future[Commit]
    clock: Callable[[], float] = time.monotonic
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    source: WorkerRecord | None = None
    renewed_at: float = 0.0
    commit: Commit | None = None
    requested: set[int] = field(default_factory=set)
    """Blocks whose pages were pulled or are being pulled: never twice, for the slower copy could outlive its source."""
    arrived: set[int] = field(default_factory=set)
    pulls: set[asyncio.Task[None]] = field(default_factory=set)
    first_pull_ns: int | None = None
    first_pull_s: float | None = None
    transfer_s: float = 0.0
    """From the first pull to the last page that has come so far, by the monotonic clock."""
    unreachable: str = ""
    """Why its pages could not be reached, if so: the next renewal tells what has become of their owner."""
    entries: set[EntryId] = field(default_factory=set)
    """Its task, and copies of it, as far as those who claimed one have told."""

    def bind(self, source: WorkerRecord) -> bool:
        """Bind to a prefill worker; False if another one was first. Idempotent."""
        if self.source is None:
            self.source = source
            self.renewed_at = self.clock()
            self.bound.set()
        return self.source.worker == source.worker and self.source.epoch == source.epoch

    def note_pull(self) -> None:
        """Note when the first pull begins."""
        if self.first_pull_ns is None:
            self.first_pull_ns, self.first_pull_s = time.time_ns(), time.monotonic()

    def is_bound_to(self, epoch: int) -> bool:
        """Whether messages of that incarnation belong to this attempt."""
        return self.source is not None and self.source.epoch == epoch

    def lose(self, loss: TryLoss, details: str) -> None:
        """Give the attempt up."""
        if not self.outcome.done():
            self.outcome.set_exception(AttemptLost(loss, details))

    def arrive(self, block_indices: Iterable[int]) -> None:
        """Note verified pages."""
        if self.first_pull_s is not None:
            self.transfer_s = time.monotonic() - self.first_pull_s
        self.arrived.update(block_indices)
        self._settle()

    def take_commit(self, commit: Commit, *, is_last: bool) -> None:
        """Note the first token; a repeated commit changes nothing. The last token of an answer needs no pages."""
        if self.commit is None:
            self.commit = commit
        if is_last and not self.outcome.done():
            self.outcome.set_result(self.commit)
        self._settle()

    async def stop(self) -> None:
        """Stop every running pull; afterwards nothing writes into our pages."""
        for pull in self.pulls:
            pull.cancel()
        await asyncio.gather(*self.pulls, return_exceptions=True)

    def _settle(self) -> None:
        if self.commit is not None and self.arrived >= self.wanted and not self.outcome.done():
            self.outcome.set_result(self.commit)


@dataclass(eq=False, slots=True)
class Reception:
    """One sequence being received into `block_ids`, the first of which is block `first_block` of the sequence.

    `clock` measures the leases of its attempts, in seconds. `num_deaths` counts the processes that were lost over
    its request, those over earlier placements included. A first token in `stop_ids` needs no pages. A commit must bring
    the logprobs of the first token if it `wants_logprobs`, and those of `num_prompt_logprobs` tokens of the prompt.
    """

    key: SequenceKey
    ids: bytes
    stop_ids: frozenset[int]
    first_block: int
    block_ids: Sequence[BlockId]
    clock: Callable[[], float] = time.monotonic
    attempt: Attempt | None = None
    task: asyncio.Task[None] | None = None
    num_deaths: int = 0
    wants_logprobs: bool = False
    num_prompt_logprobs: int = 0

    def begin(self, number: TryNumber) -> Attempt:
        """Start the next try."""
        wanted = frozenset(range(self.first_block, self.first_block + len(self.block_ids)))
        self.attempt = Attempt(number, wanted, asyncio.get_running_loop().create_future(), self.clock)
        return self.attempt

    def current(self, binding: pb.Binding) -> Attempt | None:
        """Return the running attempt if `binding` names it."""
        attempt = self.attempt
        if attempt is None or attempt.outcome.done() or attempt.number != binding.try_number:
            return None
        return attempt

    def lacks(self, first: FirstToken) -> str:
        """Return what was asked for and is missing from a commit, in words; nothing if it is complete."""
        if self.wants_logprobs and first.logprobs is None:
            return "the first token has no logprobs"
        num_here = len(first.prompt_logprobs)
        if num_here != self.num_prompt_logprobs:
            return f"{num_here} tokens of the prompt have logprobs instead of {self.num_prompt_logprobs}"
        return ""

    def copies(self, attempt: Attempt, pages: Iterable[pb.PageRef]) -> dict[int, PageCopy]:
        """Return what to copy for announced pages, by block index; none that is unwanted or was requested before."""
        return {
            page.block_index: PageCopy(
                BlockId(page.page), Generation(page.generation), self.block_ids[page.block_index - self.first_block]
            )
            for page in pages
            if page.block_index in attempt.wanted and page.block_index not in attempt.requested
        }
