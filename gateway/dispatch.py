"""The cluster as an `Engine`: places requests on decode workers through Redis and streams what they answer.

Life of a request: placed (or waiting for room) -> accepted by a worker -> tokens -> one terminal event. A placement
that is lost is followed by another that continues the shown tokens, until the failure budget is spent or the request's
time is over.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from common.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    GenerationFailed,
    GrammarViolated,
    InvalidLogits,
    InvalidRequest,
    Overloaded,
    PeerError,
    RequestCancelled,
    TandemError,
    WorkerLost,
)
from common.messages.codec import pack_ids
from common.messages.ids import ANYBODY, ChoiceIndex, GatewayId, PlacementNumber, RequestId, TenantId
from common.messages.registry import ModelCard
from common.rpc.failures import reply_from
from common.telemetry.metrics import GatewayMetrics
from gateway.cancelling import RPC_TIMEOUT_S, Canceller, Notice
from gateway.engine import EndOfChoice, GenerateEvent, GenerateRequest, Readiness, TokenDelta
from gateway.feeds import Feeds
from gateway.losses import LossReason, PlacementLost
from gateway.placing import Placer
from gateway.proofs import Proofs
from gateway.request_ids import whole_of
from gateway.roster import Roster, source_of
from gateway.spans import CANCELLED
from gateway.streams import PlacementFailed, Source, Stream
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

MIN_PROOF_TOKENS = 2
"""The first token comes from the prefill; the second one shows that pages arrived and were decoded from."""


class Dispatcher:
    """Implements `gateway.engine.Engine` over a cluster, and `gateway.feeds.FeedListener`. `clock` returns seconds;
    `max_queue_s` bounds the wait of a first placement for room, None: only its deadline does."""

    def __init__(
        self,
        gateway: GatewayId,
        max_failures: int,
        metrics: GatewayMetrics,
        proofs: Proofs,
        clock: Callable[[], float] = time.monotonic,
        max_queue_s: float | None = None,
    ) -> None:
        self._gateway = gateway
        self._max_failures = max_failures
        self._max_queue_s = max_queue_s
        self._metrics = metrics
        self.proofs = proofs
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        """By `RequestId`, as events name it."""
        self._prompts: set[asyncio.Task[None]] = set()
        self._placer: Placer
        self._canceller: Canceller
        self.roster: Roster
        self.feeds: Feeds

    def attach(self, roster: Roster, feeds: Feeds) -> None:
        """Connect to the cluster's view; called once before the first request."""
        self.roster = roster
        self.feeds = feeds
        self._placer = Placer(self._gateway, roster, feeds, self._metrics, self._clock, self._max_queue_s)
        self._canceller = Canceller(feeds)
        roster.is_trusted = self.proofs.is_trusted
        roster.corrections = self._placer.charges.take

    @property
    def num_streams(self) -> int:
        """Requests under way."""
        return len(self._streams)

    def streams(self) -> Iterable[Stream]:
        """Return the requests under way, one stream for each prompt."""
        return self._streams.values()

    async def close(self) -> None:
        """Let the last cancels go out."""
        await self._canceller.close()
        await asyncio.gather(*self._prompts, return_exceptions=True)

    async def models(self) -> Sequence[ModelCard]:
        """Return the models that have workers."""
        cards = self.roster.cards()
        if not cards and not self.roster.is_fresh:
            raise BrokerUnavailable("the registry does not answer")
        return cards

    def readiness(self) -> Readiness:
        """Return whether the registry answers and some decode worker that serves has proved itself lately."""
        if not self.roster.is_fresh:
            return Readiness(is_ready=False, reason="the registry does not answer")
        states = [state for model in self.roster.models for state in self.roster.serving_workers(model)]
        if not states:
            return Readiness(is_ready=False, reason="no decode worker is ready")
        return self.proofs.readiness([source_of(state) for state in states])

    def generate(self, request: GenerateRequest) -> "DispatchedAnswer":
        """Return the answer; see `Engine.generate`."""
        return DispatchedAnswer(self, request)

    async def next_of(self, stream: Stream) -> GenerateEvent | None:
        """Return the next event of an answer, None behind its last one, or raise why there is none."""
        while True:
            if stream.is_awaited:  # make sure that it is somewhere
                await self._placer.await_acceptance(stream)
            item = await stream.next()
            if isinstance(item, TokenDelta | EndOfChoice):
                if stream.is_finished and not stream.is_over:
                    self._finish(stream)
                return item
            if item is None:
                return None
            await self._go_on(stream, item)

    async def begin(self, stream: Stream) -> None:
        """Make the first placement, or raise why there is none."""
        stream.raise_if_ended()
        await self._placer.place(stream)

    def settle(self, stream: Stream, error: str) -> None:
        """Release all that a request holds; `error` is why it goes no further."""
        del self._streams[stream.request.request]
        stream.close(error)
        self._placer.charges.settle(stream)
        if not stream.is_over:
            self._release(stream)

    def cancel(self, request: RequestId, tenant: TenantId = ANYBODY) -> bool:
        """End a request, all its prompts, as its tenant asks for by its id; False if the tenant has none of that id
        under way here."""
        parts = [part for part in self._streams.values() if whole_of(part.request.request) == request]
        own = [part for part in parts if part.request.tenant == tenant]
        for part in own:
            part.end(RequestCancelled("the request was cancelled by its id"))
        return bool(own)

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        """See `Engine.end_choice`."""
        stream = self._streams.get(request)
        if stream is None:
            return
        if stream.end_choice(choice) and stream.choices.is_complete:
            self._release(stream)
        else:
            self._tell_unwanted(stream)

    def take(self, source: Source, event: pb.FeedEvent) -> None:
        """Take an event from a feed."""
        stream = self._streams.get(event.request)
        if stream is None or (source != stream.source and self._is_foreign(source, stream, event)):
            self._refuse(source, event)
        elif event.HasField("tokens"):  # these are most of all events
            if not stream.take_tokens(source, event.placement, event.tokens):
                self._refuse(source, event)
        elif stream.take(source, event):
            self._follow_up(source, stream, event)
        else:
            self._refuse(source, event)

    def lose(self, source: Source, loss: PlacementLost) -> None:
        """A worker is gone or stalled."""
        for stream in self._streams.values():
            stream.lose(source, loss)

    def meet(self, source: Source) -> None:
        """A worker can be talked to (again)."""
        self._canceller.resume(source)

    def _follow_up(self, source: Source, stream: Stream, event: pb.FeedEvent) -> None:
        """Do what an event asks for that the stream has taken."""
        match event.WhichOneof("event"):
            case "accepted" if not self.feeds.is_connected(source):
                # It stalled before the job reached it, which has told all that were there then, and will not be again.
                text = f"{source.worker} makes no progress"
                stream.lose(source, PlacementLost(LossReason.STALLED, text, is_failure=False))
            case "accepted":
                self._tell_unwanted(stream)
                if event.accepted.needs_prompt:
                    self._bring_prompt(source, stream)
            case "try_lost":
                self._metrics.lost_tries.inc()
                message, extra = "prefill try lost: %s", {"request_id": stream.request.request}
                logger.warning(message, event.try_lost.reason, extra=extra)

    def open(self, request: GenerateRequest) -> Stream:
        """Return the new state of a request, to be given to `settle`."""
        deadline_s = None if request.deadline_s is None else self._clock() + request.deadline_s
        stream = self._streams[request.request] = Stream(request, self._max_failures, deadline_s, self._clock)
        if request.deadline_s is not None:
            stream.end_after(request.deadline_s)
        return stream

    async def _go_on(self, stream: Stream, ending: PlacementLost | PlacementFailed) -> None:
        """Go on behind the end of a placement, with another one, or raise why not."""
        match ending:
            case PlacementLost():
                await self._place_again(stream, ending)
            case PlacementFailed(code, message):
                stream.is_over = True
                raise _failure(code, message)

    async def _place_again(self, stream: Stream, loss: PlacementLost) -> None:
        """Start another placement that continues what was shown, if anything is left to continue."""
        extra = {"request_id": stream.request.request}
        logger.warning("placement %d lost: %s", stream.placement, loss.text, extra=extra)
        stream.finish_shown()
        if stream.choices.is_complete:
            return
        stream.note_loss(loss)
        if stream.request.worker is not None:
            raise WorkerLost(loss.text) if loss.is_failure else Overloaded(loss.text)
        self._release(stream)
        self._metrics.note_failover(loss.reason)
        await self._placer.place_again(stream)

    def _finish(self, stream: Stream) -> None:
        """The answer is complete: its worker holds nothing of it any more, and has proved itself."""
        stream.is_over = True
        if stream.source is not None and stream.choices.num_own_tokens >= MIN_PROOF_TOKENS:
            self.proofs.note(stream.source)

    def _is_foreign(self, source: Source, stream: Stream, event: pb.FeedEvent) -> bool:
        """Whether a worker has taken the job out of the waiting set that must not have it: one of another version of
        the model, as all share the set, or another one than the request names. Its placement is given up. Events of the
        acceptor need no look."""
        is_acceptance = event.HasField("accepted") or (event.HasField("failed") and stream.source is None)
        if not (is_acceptance or event.tokens.is_early) or event.placement != stream.placement:
            return False
        record = self.feeds.record(source)
        if record is None:
            return False
        stream.fingerprint = stream.fingerprint or record.fingerprint
        is_unnamed = is_acceptance and stream.request.worker not in (None, source.worker)
        is_foreign = is_unnamed or record.fingerprint != stream.fingerprint
        if is_foreign and stream.is_awaited:
            stream.give_up(f"{source.worker} is not a worker for this request")
        return is_foreign

    def _release(self, stream: Stream) -> None:
        """Release the current placement everywhere, in the background."""
        request, source = stream.request.request, stream.source or stream.target
        if source is not None:
            self._canceller.cancel(Notice(source, request, stream.placement))
        view = self.roster.view(stream.request.model)
        if stream.source is None and stream.placement and view is not None:
            self._canceller.withdraw(view.jobs, request, stream.placement)

    def _tell_unwanted(self, stream: Stream) -> None:
        """Tell the worker, once it has accepted the placement, which of its choices nobody needs more of."""
        if stream.source is not None:
            for choice in stream.unwanted:
                self._canceller.cancel(Notice(stream.source, stream.request.request, stream.placement, choice))

    def _refuse(self, source: Source, event: pb.FeedEvent) -> None:
        """Tell a worker that its placement is outdated. Early copies need no answer: their sender hears it when it
        announces or commits, from the author of its task."""
        if event.tokens.is_early:
            return
        self._metrics.stale_messages.inc()
        self._canceller.cancel(Notice(source, RequestId(event.request), PlacementNumber(event.placement)))

    def _bring_prompt(self, source: Source, stream: Stream) -> None:
        task = asyncio.create_task(self._send_prompt(source, stream))
        self._prompts.add(task)
        task.add_done_callback(self._prompts.discard)

    async def _send_prompt(self, source: Source, stream: Stream) -> None:
        stub, placement = self.feeds.stub(source), stream.placement
        request = pb.PromptRequest(
            request=stream.request.request, placement=placement, ids=pack_ids(stream.request.prompt_ids)
        )
        try:
            if stub is not None:
                await reply_from(source.worker, stub.Prompt(request, timeout=RPC_TIMEOUT_S))
        except PeerError as error:
            if stream.placement == placement:
                text = f"the prompt was not delivered ({error})"
                stream.lose(source, PlacementLost(LossReason.FAILED, text))


class DispatchedAnswer:
    """Implements `gateway.engine.Generation`: begins with its first event, holds nothing behind its last one."""

    def __init__(self, dispatcher: Dispatcher, request: GenerateRequest) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._stream: Stream | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateEvent:
        """Return the next event; see `Engine.generate`."""
        event = None
        if not self._is_over:
            try:
                event = await self._next()
            except BaseException as failure:
                self._close(type(failure).__name__ if isinstance(failure, TandemError) else CANCELLED)
                raise
        if event is None:
            self._close(CANCELLED)
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Release what is held, if anything is."""
        self._close(CANCELLED)

    async def _next(self) -> GenerateEvent | None:
        stream = self._stream
        if stream is None:
            stream = self._stream = self._dispatcher.open(self._request)
            await self._dispatcher.begin(stream)
        return await self._dispatcher.next_of(stream)

    def _close(self, error: str) -> None:
        if self._stream is not None and not self._is_over:
            self._dispatcher.settle(self._stream, error)
        self._is_over = True


def _failure(code: str, message: str) -> GenerationFailed | InvalidRequest:
    match code:
        case "invalid_logits":
            return InvalidLogits(message)
        case "grammar_violated":
            return GrammarViolated(message)
        case "deadline_exceeded":
            return DeadlineExceeded(message)
        case "invalid_request" | "too_long":
            return InvalidRequest(message, code=code)
        case _:
            return GenerationFailed(message)
