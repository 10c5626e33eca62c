"""One request as its gateway sees it: which tokens the client has, and which worker may add to them.

A token is (request, placement, index). Only the next index is taken, only from the worker of the current placement
(token 1 also from the early copy), and only if that worker continued the very ids that were shown.

However far its reader lags, a stream holds nothing but the ids themselves and one ending: tokens that were not read yet
are read together, as one delta.
"""

import asyncio
from array import array
from dataclasses import dataclass

from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import Epoch, Fingerprint, PlacementNumber, WorkerId
from gateway.engine import EndOfStream, FinishReason, GenerateRequest, TokenDelta
from gateway.spans import QueueSpan
from proto import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Source:
    """One incarnation of a worker."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PlacementLost:
    """The current placement cannot go on; another one may."""

    reason: str


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """The request cannot succeed anywhere."""

    code: str
    message: str


Ending = EndOfStream | PlacementLost | PlacementFailed
StreamItem = TokenDelta | Ending


class Stream:
    """The tokens of one request and the ending of its placement; owned by the gateway's event loop."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.placement = PlacementNumber(0)
        self.num_failures = 0
        self.source: Source | None = None
        """The worker that accepted the current placement."""
        self.target: Source | None = None
        """The worker in whose stream the job was put, if one had room."""
        self.fingerprint: Fingerprint | None = request.fingerprint
        """The version of the model that answers: one alone, as another would go on with other tokens. None: any."""
        self.shown: list[int] = []
        """Every token taken, by the client's reader or waiting for it."""
        self.is_over = False
        self._chains = array("Q", [EMPTY_CHAIN])
        self._num_read = 0
        self._num_cached_tokens: int | None = None
        self._ending: Ending | None = None
        self._has_news = asyncio.Event()
        self._queued: QueueSpan | None = None
        self.bound = asyncio.Event()

    def begin_placement(self) -> None:
        """Start the next placement; what the old one still says is outdated from now on."""
        self.placement = PlacementNumber(self.placement + 1)
        self.source = None
        self.target = None
        self.bound.clear()
        self._ending = None
        self.leave_queue("placement_lost")
        self._queued = QueueSpan(self.request, self.placement)

    async def next(self) -> StreamItem:
        """Wait for the tokens that were not read yet, else for the ending of the current placement."""
        while True:
            if self._num_read < len(self.shown):
                return self._read()
            if self._ending is not None:
                return self._ending
            self._has_news.clear()
            await self._has_news.wait()

    @property
    def is_awaited(self) -> bool:
        """Whether the current placement may still be accepted."""
        return not self.bound.is_set() and self._ending is None

    def finished_by_shown(self) -> EndOfStream | None:
        """Return the end of the answer if the shown tokens are all of it (only the terminal event was lost)."""
        sampling = self.request.sampling
        if self.shown and self.shown[-1] in sampling.stop_ids and len(self.shown) > sampling.min_tokens:
            return self._end(FinishReason.STOP)
        if len(self.shown) >= sampling.max_tokens:
            return self._end(FinishReason.LENGTH)
        return None

    def lose(self, source: Source, reason: str) -> None:
        """The connection to `source` is gone."""
        if source == (self.source or self.target):
            self._conclude(PlacementLost(reason))

    def leave_queue(self, error: str) -> None:
        """End the wait for acceptance without it; nothing happens if the placement was accepted."""
        if self._queued is not None:
            self._queued.end(error)

    def give_up(self, reason: str) -> None:
        """Nobody has accepted the current placement; another one may do better."""
        self._conclude(PlacementLost(reason))

    def take(self, source: Source, event: pb.FeedEvent) -> bool:
        """Take an event from a feed; False if it is outdated and its sender should release what it holds."""
        if event.placement != self.placement or self.is_over:
            return False
        match event.WhichOneof("event"):
            case "accepted":
                return self._take_accepted(source)
            case "tokens" if event.tokens.is_early:
                self._take_early(event.tokens)
                return True
            case _ if source != self.source:
                return False
            case "tokens":
                self._take_tokens(event.tokens)
            case "finished":
                self._take_finished(event.finished)
            case "failed":
                self._take_failed(event.failed)
        return True

    def _take_accepted(self, source: Source) -> bool:
        if self.source is None:
            self.source = source
            self.bound.set()
            assert self._queued is not None  # a placement has begun
            self._queued.accept(source.worker)
        return self.source == source

    def _take_early(self, tokens: pb.Tokens) -> None:
        if tokens.index == len(self.shown) and tokens.chain == self._chains[-1]:
            self._show(tokens, list(tokens.ids))

    def _take_tokens(self, tokens: pb.Tokens) -> None:
        if tokens.index > len(self.shown):
            self._conclude(PlacementLost("token frames are missing"))
            return
        num_known = len(self.shown) - tokens.index
        known = self.shown[tokens.index :]
        if tokens.chain != self._chains[tokens.index] or list(tokens.ids[:num_known]) != known[: len(tokens.ids)]:
            self._conclude(PlacementLost("the worker continued other tokens than were shown"))
            return
        new = list(tokens.ids[num_known:])
        if new:
            self._show(tokens, new)

    def _take_finished(self, finished: pb.Finished) -> None:
        if finished.num_generated != len(self.shown):
            self._conclude(PlacementLost("the last token frames are missing"))
            return
        if self._num_cached_tokens is None:
            self._num_cached_tokens = finished.num_cached_tokens
        self._conclude(self._end(FinishReason(finished.reason)))

    def _take_failed(self, failed: pb.Failed) -> None:
        if failed.is_retryable:
            self._conclude(PlacementLost(failed.message))
        else:
            self._conclude(PlacementFailed(failed.code, failed.message))

    def _show(self, tokens: pb.Tokens, new: list[int]) -> None:
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

    def _end(self, reason: FinishReason) -> EndOfStream:
        return EndOfStream(reason, len(self.shown), self._num_cached_tokens or 0)

    def _conclude(self, ending: Ending) -> None:
        """Note how the placement ends; only the first word counts."""
        self._ending = self._ending or ending
        self._has_news.set()
