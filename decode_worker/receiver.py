"""Receives remote prefills: publishes tasks, binds claimers, pulls their pages, and falls back to a local prefill.

Life of a reception: pages reserved -> task published (try n) -> bound -> pages announced and pulled while the next
chunk computes -> committed -> activated. A lost try is followed by the next one, the last by a local prefill. On every
way out the pulls are stopped before the pages are let go, we delete the task as its author, and its claimer is told.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from common.broker.protocols import TaskQueue
from common.errors import BrokerUnavailable, PageCorrupt, PeerError, PeerUnreachable, StalePage
from common.lifecycle.uninterrupted import uninterrupted
from common.messages.ids import BlockId, EntryId, Epoch, TryNumber, WorkerId
from common.messages.job import SUSPECT_DEATHS, PrefillTask
from common.messages.registry import Role, WorkerRecord
from common.runtime.peers import Peers
from common.scheduling.emission import FailureCode
from common.scheduling.sequence import PlacementKey, SequenceKey
from common.telemetry.logs import request_id
from common.transfer.protocols import PageCopy
from decode_worker.core import Activate, Command, Fail, FallBack, LetGo, Reserved
from decode_worker.emitter import Emitter
from decode_worker.fetcher import Fetcher
from decode_worker.ledger import Live
from decode_worker.reception import Attempt, AttemptLost, Commit, Reception, TryLoss
from decode_worker.releases import Releases
from decode_worker.retirements import Retirements
from decode_worker.witness import Witness
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

MAX_TRIES = 2

BIND_TIMEOUT_S = 5.0
"""A task nobody has bound in this time is published again: it may be lost, or its claimer stuck."""

PEER_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Author:
    """Who publishes: this decode worker."""

    worker: WorkerId
    epoch: Epoch


class Receiver:
    """All receptions of one decode worker."""

    def __init__(
        self,
        author: Author,
        tasks: TaskQueue,
        peers: Peers,
        fetcher: Fetcher,
        releases: Releases,
        retirements: Retirements,
        submit: Callable[[Command], None],
        emitter: Emitter,
        witness: Witness,
        clock: Callable[[], float],
        doubt: Callable[[], None],
        is_claimer_gone: Callable[[EntryId], Awaitable[bool]],
    ) -> None:
        """`clock` (seconds) measures the patience with others; `doubt` is called when one of them cannot be reached;
        `is_claimer_gone` tells whether a task has been claimed by somebody who has died since.
        """
        self._author = author
        self._tasks = tasks
        self._peers = peers
        self._fetcher = fetcher
        self._releases = releases
        self._retirements = retirements
        self._submit = submit
        self._emitter = emitter
        self._witness = witness
        self._clock = clock
        self._doubt = doubt
        self._is_claimer_gone = is_claimer_gone
        self._receptions: dict[PlacementKey, Reception] = {}
        """By placement: the choice that leads is received, and if it is cancelled alone, no other one."""
        self._running: set[asyncio.Task[None]] = set()
        """Also those of dropped receptions, until their pulls have stopped."""

    def begin(self, live: Live, ids: bytes, reserved: Reserved) -> None:
        """Start to receive a sequence (packed `ids`) whose pages are reserved."""
        sampling = live.job.sampling
        reception = Reception(
            reserved.key,
            ids,
            frozenset() if len(live.open_choices) > 1 else frozenset(sampling.stop_ids),  # the others need the pages
            reserved.first_block,
            reserved.block_ids,
            self._clock,
        )
        reception.num_deaths = live.job.num_deaths
        reception.wants_logprobs = sampling.num_logprobs is not None
        if sampling.num_prompt_logprobs is not None and not live.answers[reserved.key.choice].shown:
            reception.num_prompt_logprobs = live.job.num_prompt_tokens - 1
        self._receptions[live.key] = reception
        task = asyncio.create_task(self._receive(reception, live, len(ids) // 4), name=f"receive-{reserved.key}")
        reception.task = task
        self._running.add(task)
        task.add_done_callback(partial(self._let_go, reception))

    def drop(self, key: PlacementKey) -> None:
        """Cancel a reception; its pages are let go when its pulls have stopped."""
        reception = self._receptions.pop(key, None)
        if reception is not None and reception.task is not None:
            reception.task.cancel()

    async def close(self) -> None:
        """Drop every reception; return when nothing writes into our pages any more."""
        for key in list(self._receptions):
            self.drop(key)
        await asyncio.gather(*self._running, return_exceptions=True)

    def find(self, key: PlacementKey) -> Reception | None:
        """Return the reception of a placement."""
        return self._receptions.get(key)

    def attempts(self) -> list[tuple[SequenceKey, Attempt]]:
        """Return the bound attempts: what our leases must keep alive."""
        return [
            (reception.key, reception.attempt)
            for reception in self._receptions.values()
            if reception.attempt is not None and reception.attempt.source is not None
        ]

    def pull(self, reception: Reception, attempt: Attempt, pages: list[pb.PageRef]) -> None:
        """Start to copy announced pages; the result goes to the attempt."""
        copies = reception.copies(attempt, pages)
        source = attempt.source
        if not copies or source is None:
            return
        attempt.requested.update(copies)
        attempt.note_pull()
        checksums = {
            copies[page.block_index].target: page.checksum
            for page in pages
            if page.HasField("checksum") and page.block_index in copies
        }
        task = asyncio.create_task(self._pull(reception.key, attempt, source, copies, checksums))
        attempt.pulls.add(task)
        task.add_done_callback(attempt.pulls.discard)

    async def _receive(self, reception: Reception, live: Live, num_tokens: int) -> None:
        request_id.set(live.job.request)
        try:
            outcome = await self._try_all(reception, live, num_tokens)
        except Exception:  # root of a task: the request goes on without what has failed here
            logger.exception("receiving failed")
            outcome = None
        match outcome:
            case Commit(first):
                self._submit(Activate(reception.key, first))
            case FailureCode():
                self._submit(Fail(reception.key, outcome))
            case None:
                self._witness.fell_back(live)
                live.is_suspect = reception.num_deaths >= SUSPECT_DEATHS
                self._submit(FallBack(reception.key, alone=live.is_suspect))
            case _:
                assert_never(outcome)

    def _let_go(self, reception: Reception, task: asyncio.Task[None]) -> None:
        """Runs on every way out, also if the task was cancelled before its first step."""
        self._running.discard(task)
        placement = reception.key.of_placement
        if self._receptions.get(placement) is reception:
            del self._receptions[placement]
        self._submit(LetGo(reception.key))

    async def _try_all(self, reception: Reception, live: Live, num_tokens: int) -> Commit | FailureCode | None:
        """Return the commit, why the request fails wherever it is computed, or None if nobody has prefilled it."""
        for number in range(1, MAX_TRIES + 1):
            if not self._peers.ready(Role.PREFILL):
                return None
            try:
                return await self._try(reception, live, num_tokens, TryNumber(number))
            except AttemptLost as lost:
                logger.warning("prefill try %d lost (%s): %s", number, lost.loss, lost)
                if lost.loss is TryLoss.VIOLATED:
                    return FailureCode.GRAMMAR_VIOLATED
                if lost.loss in (TryLoss.SILENT, TryLoss.UNREACHABLE):
                    self._shun(reception)
                if lost.loss.is_failure:
                    reception.num_deaths += 1
                    self._emitter.try_lost(live, lost.loss)
                    if reception.num_deaths >= SUSPECT_DEATHS:
                        return None
            except BrokerUnavailable as error:
                logger.warning("prefill try %d lost: %s", number, error)
        return None

    def _shun(self, reception: Reception) -> None:
        """Count on a worker that cannot be reached no more: with no other one prompts are computed here meanwhile."""
        source = reception.attempt.source if reception.attempt is not None else None
        if source is not None:
            self._peers.shun(source.epoch)

    async def _try(self, reception: Reception, live: Live, num_tokens: int, number: TryNumber) -> Commit:
        attempt = reception.begin(number)
        publishing = asyncio.create_task(self._tasks.publish(self._task(reception.key, live, num_tokens, number)))
        try:
            entry = await asyncio.shield(publishing)  # when we are cancelled now, we still need to know what to delete
            self._witness.tried()
            await self._await_binding(attempt, entry)
            commit = await asyncio.shield(attempt.outcome)  # our cancellation must not cancel what others set
            self._witness.handed_over(live, attempt)
            return commit
        except AttemptLost as lost:
            self._witness.lost_try(live, attempt, lost.loss)
            raise
        except BrokerUnavailable as error:
            self._witness.lost_try(live, attempt, type(error).__name__)
            raise
        except asyncio.CancelledError:
            self._witness.cancelled_try(live, attempt)
            raise
        finally:
            await uninterrupted(self._end(reception.key, attempt, publishing))

    async def _await_binding(self, attempt: Attempt, entry: EntryId) -> None:
        deadline = self._clock() + BIND_TIMEOUT_S
        while not attempt.bound.is_set():
            if self._clock() > deadline:
                raise AttemptLost(TryLoss.UNBOUND, "no prefill worker has bound the task in time")
            if not self._peers.ready(Role.PREFILL):
                raise AttemptLost(TryLoss.ABANDONED, "no prefill worker is left")
            try:
                async with asyncio.timeout(PEER_CHECK_S):
                    await attempt.bound.wait()
            except TimeoutError:  # look at the others again
                if await self._is_claimer_gone(entry) and not attempt.bound.is_set():
                    raise AttemptLost(TryLoss.UNBOUND, "who had claimed the task is gone") from None

    async def _end(self, key: SequenceKey, attempt: Attempt, publishing: asyncio.Task[EntryId]) -> None:
        """End a try. The others hear of it at once, however long the last copy takes to stop."""
        attempt.lose(TryLoss.OVER, "over")
        attempt.outcome.exception()  # retrieved: a loss that nobody awaited is no error
        if attempt.source is not None:
            self._releases.add(attempt.source, key, attempt.number)
        retiring = asyncio.create_task(self._retire(attempt, publishing))
        await attempt.stop()
        await retiring

    async def _retire(self, attempt: Attempt, publishing: asyncio.Task[EntryId]) -> None:
        """Delete the task and its copies. What is claimed later, because the reply to its publication was lost or Redis
        delivers it again, is named by its claimer then."""
        with contextlib.suppress(BrokerUnavailable):
            attempt.entries.add(await publishing)
        for entry in attempt.entries:
            await self._retirements.retire(entry)

    async def _pull(
        self,
        key: SequenceKey,
        attempt: Attempt,
        source: WorkerRecord,
        copies: Mapping[int, PageCopy],
        checksums: Mapping[BlockId, int],
    ) -> None:
        try:
            await self._fetcher.fetch(source, list(copies.values()), checksums)
        except PeerError as error:
            self._lose(key, attempt, error)
        except Exception as error:  # root of a task: nobody else would notice that the pages do not come
            logger.exception("a pull failed", extra={"request_id": key.request})
            self._witness.lost_pull()
            attempt.lose(TryLoss.BROKEN, repr(error))
        else:
            attempt.arrive(copies)

    def _lose(self, key: SequenceKey, attempt: Attempt, error: PeerError) -> None:
        self._witness.lost_pull()
        match error:
            case PeerUnreachable():
                attempt.unreachable = str(error)
                self._doubt()
            case StalePage():
                attempt.lose(TryLoss.MISSED, str(error))
            case PageCorrupt():
                self._witness.found_corrupt(key, error)
                attempt.lose(TryLoss.CORRUPT, str(error))
            case _:
                attempt.lose(TryLoss.REFUSED, str(error))

    def _task(self, key: SequenceKey, live: Live, num_tokens: int, number: TryNumber) -> PrefillTask:
        job = live.job
        return PrefillTask(
            request=job.request,
            placement=job.placement,
            try_number=number,
            author=self._author.worker,
            author_epoch=self._author.epoch,
            gateway=job.gateway,
            num_tokens=num_tokens,
            num_prompt_tokens=job.num_prompt_tokens,
            sampling=job.sampling,
            cache_salt=job.cache_salt,
            traceparent=job.traceparent,
            tracestate=job.tracestate,
            choice=key.choice,
        )
