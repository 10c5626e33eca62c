"""The cluster as an `Engine`: places requests on decode workers through Redis and streams what they answer.

Life of a request: placed (or waiting for room) -> accepted by a worker -> tokens -> one terminal event. A placement
that is lost is followed by another that continues the shown tokens, until the failure budget is spent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import grpc

from common.broker.protocols import Candidate, JobQueue, Placed, Whereabouts
from common.errors import (
    BrokerUnavailable,
    GenerationFailed,
    InvalidLogits,
    InvalidRequest,
    Overloaded,
    TandemError,
    WorkerLost,
)
from common.messages.codec import pack_ids
from common.messages.ids import GatewayId, RequestId
from common.messages.job import Job
from common.messages.registry import ModelCard, WorkerState
from common.telemetry.metrics import GatewayMetrics
from gateway.engine import EndOfStream, GenerateEvent, GenerateRequest, Readiness, TokenDelta
from gateway.feeds import Feeds
from gateway.proofs import Proofs
from gateway.roster import Roster, source_of
from gateway.spans import CANCELLED
from gateway.streams import PlacementFailed, PlacementLost, Source, Stream, StreamItem
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

MAX_CANDIDATES = 8
MAX_INLINE_BYTES = 4096
"""Longer prompts travel directly to the worker that accepted the job; Redis holds small records."""

ACCEPT_CHECK_S = 1.0
MAX_UNACCEPTED_CHECKS = 5
"""So often may a placed job be neither accepted nor findable before it is placed again."""

FAILOVER_WAIT_S = 30.0
"""How long a request that lost its worker waits for another one."""

RPC_TIMEOUT_S = 2.0

MIN_PROOF_TOKENS = 2
"""The first token comes from the prefill; the second one shows that pages arrived and were decoded from."""


class Dispatcher:
    """Implements `gateway.engine.Engine` over a cluster."""

    def __init__(self, gateway: GatewayId, max_failures: int, metrics: GatewayMetrics, proofs: Proofs) -> None:
        self._gateway = gateway
        self._max_failures = max_failures
        self._metrics = metrics
        self.proofs = proofs
        self._streams: dict[RequestId, Stream] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.roster: Roster
        self.feeds: Feeds

    def attach(self, roster: Roster, feeds: Feeds) -> None:
        """Connect to the cluster's view; called once before the first request."""
        self.roster = roster
        self.feeds = feeds
        roster.is_trusted = self.proofs.is_trusted

    @property
    def num_streams(self) -> int:
        """Requests under way."""
        return len(self._streams)

    async def close(self) -> None:
        """Let the last cancels go out."""
        await asyncio.gather(*self._background, return_exceptions=True)

    async def models(self) -> Sequence[ModelCard]:
        """Return the models that have workers."""
        cards = self.roster.cards()
        if not cards and not self.roster.is_fresh:
            raise BrokerUnavailable("the registry does not answer")
        return cards

    def readiness(self) -> Readiness:
        """Return whether the registry answers and some decode worker that takes work has proved itself lately."""
        if not self.roster.is_fresh:
            return Readiness(is_ready=False, reason="the registry does not answer")
        states = [state for model in self.roster.models for state in self.roster.open_workers(model)]
        if not states:
            return Readiness(is_ready=False, reason="no decode worker is ready")
        return self.proofs.readiness([source_of(state) for state in states])

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the answer; see `Engine.generate`."""
        stream = Stream(request)
        self._streams[request.request] = stream
        error = CANCELLED
        try:
            await self._place(stream)
            while True:
                item = await self._next(stream)
                match item:
                    case TokenDelta():
                        yield item
                    case EndOfStream():
                        stream.is_over = True
                        if stream.source is not None and item.num_generated >= MIN_PROOF_TOKENS:
                            self.proofs.note(stream.source)
                        yield item
                        return
                    case PlacementLost(reason):
                        end = await self._place_again(stream, reason)
                        if end is not None:
                            yield end
                            return
                    case PlacementFailed(code, message):
                        stream.is_over = True
                        raise _failure(code, message)
        except TandemError as failure:
            error = type(failure).__name__
            raise
        finally:
            del self._streams[request.request]
            stream.leave_queue(error)
            if not stream.is_over:
                self._cancel(stream)

    def take(self, source: Source, event: pb.FeedEvent) -> None:
        """Take an event from a feed."""
        stream = self._streams.get(RequestId(event.request))
        if stream is None or self._is_foreign(source, stream, event) or not stream.take(source, event):
            self._refuse(source, event)
        elif event.HasField("accepted") and event.accepted.needs_prompt:
            self._spawn(self._send_prompt(source, stream))

    def lose(self, source: Source, reason: str) -> None:
        """A worker's feed is broken."""
        for stream in self._streams.values():
            stream.lose(source, reason)

    def _is_foreign(self, source: Source, stream: Stream, event: pb.FeedEvent) -> bool:
        """Whether a worker of another version of the model has taken the job, out of the waiting set that all versions
        share. Its placement is given up. Later events need no look: they are taken from the acceptor alone."""
        if not (event.HasField("accepted") or event.tokens.is_early):
            return False
        record = self.feeds.record(source)
        if record is None or event.placement != stream.placement:
            return False
        stream.fingerprint = stream.fingerprint or record.fingerprint
        is_foreign = record.fingerprint != stream.fingerprint
        if is_foreign and stream.is_awaited:
            stream.give_up(f"{source.worker} serves another version of the model")
        return is_foreign

    async def _next(self, stream: Stream) -> StreamItem:
        """Wait for the next item; while nobody has accepted the placement, make sure that it is somewhere."""
        if stream.is_awaited:
            await self._await_acceptance(stream)
        return await stream.next()

    async def _await_acceptance(self, stream: Stream) -> None:
        num_unknown = 0
        num_checks = 0
        while stream.is_awaited:
            try:
                async with asyncio.timeout(ACCEPT_CHECK_S):
                    await stream.bound.wait()
                    return
            except TimeoutError:
                num_checks += 1
            where = await self._whereabouts(stream)
            if not stream.is_awaited:
                return
            if where == Whereabouts.WAITING:
                self._check_wait(stream, num_checks)
                continue
            num_unknown += 1
            is_gone = stream.target is not None and not self.feeds.is_connected(stream.target)
            if is_gone or num_unknown > (MAX_UNACCEPTED_CHECKS if where == Whereabouts.PLACED else 1):
                stream.give_up("no worker has accepted the request in time")

    def _check_wait(self, stream: Stream, num_checks: int) -> None:
        if stream.num_failures and num_checks * ACCEPT_CHECK_S > FAILOVER_WAIT_S:
            raise WorkerLost("the worker that held this request is gone and no other one took over")

    async def _whereabouts(self, stream: Stream) -> str:
        try:
            return await self._jobs(stream).whereabouts(stream.request.request, stream.placement)
        except BrokerUnavailable:
            return Whereabouts.PLACED  # cannot tell: wait on

    async def _place_again(self, stream: Stream, reason: str) -> EndOfStream | None:
        """Start another placement that continues what was shown; return the end if nothing is left to continue."""
        stream.num_failures += 1
        logger.warning("placement %d lost: %s", stream.placement, reason, extra={"request_id": stream.request.request})
        end = stream.finished_by_shown()
        if end is not None:
            return end
        if stream.num_failures >= self._max_failures:
            raise WorkerLost(f"the request failed {stream.num_failures} times, last because {reason}")
        self._cancel(stream)
        await self._place(stream)
        return None

    async def _place(self, stream: Stream) -> None:
        request = stream.request
        workers = self._workers(stream)
        if not workers and stream.num_failures == 0:
            raise Overloaded("no decode worker is ready to take the request", retry_after_s=2.0)
        stream.begin_placement()
        self._metrics.note_placement("again" if stream.num_failures else "first")
        num_tokens = len(request.prompt_ids) + len(stream.shown)
        candidates = [Candidate(state.record.worker, state.record.epoch) for state in workers[:MAX_CANDIDATES]]
        num_blocks = _blocks_needed(workers, num_tokens) if workers else 1
        placed = await self._jobs(stream).place(self._job(stream), num_blocks, candidates)
        if isinstance(placed, Placed):
            stream.target = Source(placed.worker, placed.epoch)

    def _workers(self, stream: Stream) -> list[WorkerState]:
        """Return the workers of the version of the model that must answer: prompt and shown tokens are ids of its
        tokenizer, and mean something else to another version's."""
        workers = self.roster.decode_workers(stream.request.model)
        if stream.fingerprint is None:
            return workers
        akin = [state for state in workers if state.record.fingerprint == stream.fingerprint]
        if workers and not akin:
            reason = "only workers of another version of the model are left"
            raise WorkerLost(reason) if stream.shown else Overloaded(reason, retry_after_s=1.0)
        return akin

    def _job(self, stream: Stream) -> Job:
        request = stream.request
        prompt = pack_ids(request.prompt_ids)
        return Job(
            request=request.request,
            placement=stream.placement,
            gateway=self._gateway,
            model=request.model,
            num_prompt_tokens=len(request.prompt_ids),
            sampling=request.sampling,
            prompt=prompt if len(prompt) <= MAX_INLINE_BYTES else None,
            shown=pack_ids(stream.shown),
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            tracestate=request.tracestate,
        )

    def _jobs(self, stream: Stream) -> JobQueue:
        view = self.roster.view(stream.request.model)
        assert view is not None  # a request is only made for a model with a card
        return view.jobs

    def _cancel(self, stream: Stream) -> None:
        """Release the current placement everywhere, in the background."""
        source = stream.source or stream.target
        if source is not None:
            self._spawn(self._send_cancel(source, stream.request.request, stream.placement))
        if stream.source is None:
            self._spawn(self._withdraw(self._jobs(stream), stream.request.request, stream.placement))

    def _refuse(self, source: Source, event: pb.FeedEvent) -> None:
        """Tell a worker that its placement is outdated, once, when it would go on otherwise."""
        if event.WhichOneof("event") == "accepted":
            self._spawn(self._send_cancel(source, RequestId(event.request), event.placement))

    async def _send_cancel(self, source: Source, request: RequestId, placement: int) -> None:
        stub = self.feeds.stub(source)
        if stub is None:
            return
        try:
            await stub.Cancel(pb.CancelRequest(request=request, placement=placement), timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = error.code().name
            logger.info("cancel not delivered to %s: %s", source.worker, problem, extra={"request_id": request})

    async def _withdraw(self, jobs: JobQueue, request: RequestId, placement: int) -> None:
        try:
            await jobs.withdraw(request, placement)  # type: ignore[arg-type] # a placement number by construction
        except BrokerUnavailable as error:
            logger.info("job not withdrawn: %s", error, extra={"request_id": request})

    async def _send_prompt(self, source: Source, stream: Stream) -> None:
        stub = self.feeds.stub(source)
        request = pb.PromptRequest(
            request=stream.request.request, placement=stream.placement, ids=pack_ids(stream.request.prompt_ids)
        )
        try:
            if stub is not None:
                await stub.Prompt(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            stream.lose(source, f"the prompt was not delivered ({error.code().name})")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _blocks_needed(workers: Sequence[WorkerState], num_tokens: int) -> int:
    """Return the blocks for the prompt and one step; raise if no worker's whole pool would hold them."""
    largest = max(workers, key=lambda state: state.record.num_blocks).record
    num_blocks = -(-(num_tokens + 1) // largest.block_size)
    if num_blocks > largest.num_blocks:
        capacity = largest.num_blocks * largest.block_size
        raise InvalidRequest(
            f"The prompt of {num_tokens} tokens exceeds the KV capacity of {capacity} tokens of every worker.",
            param="prompt",
            code="context_length_exceeded",
        )
    return num_blocks


def _failure(code: str, message: str) -> GenerationFailed | InvalidRequest:
    match code:
        case "invalid_logits":
            return InvalidLogits(message)
        case "invalid_request" | "too_long":
            return InvalidRequest(message, code=code)
        case _:
            return GenerationFailed(message)
