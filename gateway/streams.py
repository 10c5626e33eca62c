"""One request as its gateway sees it: which tokens the client has, and which worker may add to them.

A token is (request, placement, index). Only the next index is taken, only from the worker of the current placement
(token 1 also from the early copy), and only if that worker continued the very ids that were shown.
"""

import asyncio
from dataclasses import dataclass

from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import Epoch, PlacementNumber, WorkerId
from gateway.engine import EndOfStream, FinishReason, GenerateRequest, TokenDelta
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


StreamItem = TokenDelta | EndOfStream | PlacementLost | PlacementFailed


class Stream:
    """Shown tokens and the inbox of one request; owned by the gateway's event loop."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.placement = PlacementNumber(0)
        self.num_failures = 0
        self.source: Source | None = None
        """The worker that accepted the current placement."""
        self.target: Source | None = None
        """The worker in whose stream the job was put, if one had room."""
        self.shown: list[int] = []
        self.is_over = False
        self._chains = [EMPTY_CHAIN]
        self._inbox: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.bound = asyncio.Event()

    def begin_placement(self) -> None:
        """Start the next placement; what the old one still says is outdated from now on."""
        self.placement = PlacementNumber(self.placement + 1)
        self.source = None
        self.target = None
        self.bound.clear()
        self._inbox = asyncio.Queue()

    async def next(self) -> StreamItem:
        """Wait for the next item of the current placement."""
        return await self._inbox.get()

    def finished_by_shown(self) -> EndOfStream | None:
        """Return the end of the answer if the shown tokens are all of it (only the terminal event was lost)."""
        sampling = self.request.sampling
        if self.shown and self.shown[-1] in sampling.stop_ids and len(self.shown) > sampling.min_tokens:
            return EndOfStream(FinishReason.STOP, len(self.shown))
        if len(self.shown) >= sampling.max_tokens:
            return EndOfStream(FinishReason.LENGTH, len(self.shown))
        return None

    def lose(self, source: Source, reason: str) -> None:
        """The connection to `source` is gone."""
        if source == (self.source or self.target):
            self._inbox.put_nowait(PlacementLost(reason))

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
        return self.source == source

    def _take_early(self, tokens: pb.Tokens) -> None:
        if tokens.index == len(self.shown) and tokens.chain == self._chains[-1]:
            self._show(tokens.index, list(tokens.ids))

    def _take_tokens(self, tokens: pb.Tokens) -> None:
        if tokens.index > len(self.shown):
            self._inbox.put_nowait(PlacementLost("token frames are missing"))
            return
        num_known = len(self.shown) - tokens.index
        known = self.shown[tokens.index :]
        if tokens.chain != self._chains[tokens.index] or list(tokens.ids[:num_known]) != known[: len(tokens.ids)]:
            self._inbox.put_nowait(PlacementLost("the worker continued other tokens than were shown"))
            return
        new = list(tokens.ids[num_known:])
        if new:
            self._show(len(self.shown), new)

    def _take_finished(self, finished: pb.Finished) -> None:
        if finished.num_generated != len(self.shown):
            self._inbox.put_nowait(PlacementLost("the last token frames are missing"))
            return
        end = EndOfStream(FinishReason(finished.reason), finished.num_generated, finished.num_cached_tokens)
        self._inbox.put_nowait(end)

    def _take_failed(self, failed: pb.Failed) -> None:
        if failed.is_retryable:
            self._inbox.put_nowait(PlacementLost(failed.message))
        else:
            self._inbox.put_nowait(PlacementFailed(failed.code, failed.message))

    def _show(self, index: int, ids: list[int]) -> None:
        for token_id in ids:
            self._chains.append(extend_chain(self._chains[-1], token_id))
        self.shown.extend(ids)
        self._inbox.put_nowait(TokenDelta(index, tuple(ids)))
