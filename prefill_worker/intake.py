"""Claims prefill tasks when there is room, binds them at their authors, and hands the sequences to the engine.

A task is pulled, never pushed. It is deleted by its author alone, except when the author's epoch is gone: then the
claimer removes the orphan.

One author is asked at a time, so that all prefill workers get their share of the tasks; but an author that does not
answer soon delays nobody else's. A worker that drains claims nothing more; what the claim under way still brings is
bound and computed as ever. Handing it back would take a second entry for one try, which its author could not delete, or
a delay that its author would have to wait for.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from common.broker.backoff import Retry
from common.broker.protocols import Delivery, TaskQueue
from common.errors import BrokerUnavailable, InvalidGrammar, MalformedRecord, PeerError
from common.messages.codec import unpack_ids
from common.messages.ids import EntryId, Epoch, Fingerprint, WorkerId
from common.messages.job import PrefillTask
from common.messages.registry import WorkerRecord
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.runtime.peers import Peers
from common.scheduling.sequence import Sequence
from prefill_worker.core import Admit, Command
from prefill_worker.holdings import BindingKey, Holding, Holdings
from prefill_worker.limits import Limits
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import DecodeStub

logger = logging.getLogger(__name__)

CLAIM_BLOCK_S = 1.0
BIND_TIMEOUT_S = 2.0
BIND_USUAL_S = 0.1
"""An author that has not answered by then is late, for all that is asked of it: others are asked meanwhile. (An answer
takes 2 ms.)"""

MAX_ASKED = 256
"""Tasks whose authors are late, at most."""

ORPHAN_IDLE_S = 30.0
"""A task that was claimed this long ago and is still there: its author deletes it sooner, if it lives."""

AUTHOR_CHECK_S = 2.0
"""Authors of our own recent claims are looked at this often: a few look-ups in memory."""


class Intake:
    """Claims until cancelled."""

    def __init__(
        self,
        worker: WorkerId,
        epoch: Epoch,
        fingerprint: Fingerprint,
        tasks: TaskQueue,
        peers: Peers,
        channels: Channels,
        holdings: Holdings,
        submit: Callable[[Command], None],
        follow: Callable[[Holding], None],
        has_room: Callable[[], bool],
        prepare_grammar: Callable[[str], Awaitable[None]],
        clock: Callable[[], float],
        limits: Limits,
    ) -> None:
        self._worker = worker
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._tasks = tasks
        self._peers = peers
        self._channels = channels
        self._holdings = holdings
        self._submit = submit
        self._follow = follow
        self._has_room = has_room
        self._prepare_grammar = prepare_grammar
        self._clock = clock
        self._limits = limits
        self._room = asyncio.Event()
        self._arrivals = itertools.count()
        self._claims: dict[EntryId, tuple[float, Delivery]] = {}
        """What we claimed in the last `ORPHAN_IDLE_S`, and when: orphaned if its author dies meanwhile."""
        self._asked: dict[EntryId, tuple[Epoch, float]] = {}
        """Claimed tasks that are not bound yet: who is asked, and since when."""
        self._is_claiming = False
        self._retry = Retry()

    @property
    def is_at_rest(self) -> bool:
        """Whether no task is being claimed or bound."""
        return not (self._is_claiming or self._asked)

    def touch(self) -> None:
        """The engine's load has changed: there may be room now."""
        self._room.set()

    async def run(self) -> None:
        """Claim tasks and bind them until cancelled."""
        async with asyncio.TaskGroup() as bindings:
            while True:
                await self._wait_for_room()
                delivery = await self._claim()
                if delivery is not None:
                    self._asked[delivery.entry] = (delivery.task.author_epoch, time.monotonic())
                    bindings.create_task(self._ask(delivery), name=f"bind-{delivery.entry}")

    async def watch_authors(self) -> None:
        """Remove tasks of ours whose author has died since we claimed them, until cancelled."""
        while True:
            await asyncio.sleep(AUTHOR_CHECK_S)
            try:
                await self.check_authors()
            except BrokerUnavailable as error:
                logger.warning("cannot look for the authors of tasks: %s", error)

    async def check_authors(self) -> None:
        """Delete the tasks of our recent claims whose author's epoch is gone; forget the older ones."""
        now = self._clock()
        self._claims = {entry: claim for entry, claim in self._claims.items() if now - claim[0] < ORPHAN_IDLE_S}
        for entry, (_, delivery) in list(self._claims.items()):
            if await self._is_orphaned(delivery):
                self._claims.pop(entry, None)
                await self._tasks.delete(entry)

    async def sweep(self) -> None:
        """Remove orphans of everybody until cancelled: their claimers may have died too."""
        while True:
            await asyncio.sleep(ORPHAN_IDLE_S / 3)
            try:
                for delivery in await self._tasks.abandoned(self._worker, self._epoch, ORPHAN_IDLE_S):
                    if await self._is_orphaned(delivery):
                        await self._tasks.delete(delivery.entry)
            except BrokerUnavailable as error:
                logger.warning("cannot look for orphaned tasks: %s", error)

    async def take(self, delivery: Delivery) -> None:
        """Bind one claimed task and start its prefill; an orphan is deleted. The author of a copy of what we hold is
        told of it, to delete it; a task that was claimed before is not ours to bind again."""
        task = delivery.task
        await self._prepare(task)
        key = BindingKey(task.request, task.placement, task.try_number)
        holding = self._holdings.get(key)
        if holding is not None and holding.entry == delivery.entry:
            return
        author = await self._author(delivery)
        if author is None:
            if self._peers.is_in_doubt:
                return  # looked at again by `check_authors`
            details = {"request_id": task.request}
            logger.info("deleting the task of a decode worker that is gone", extra=details)
            await self._tasks.delete(delivery.entry)
            return
        if holding is not None:
            await self._bind(delivery, author)
            return
        with self._holdings.binding(key):
            reply = await self._bind(delivery, author)
            if reply is not None and reply.verdict == pb.VERDICT_GO:
                self._start(delivery, author, reply)

    async def _prepare(self, task: PrefillTask) -> None:
        """Compile the grammar of a task before its lease begins."""
        if task.sampling.grammar is None:
            return
        try:
            await self._prepare_grammar(task.sampling.grammar)
        except InvalidGrammar:  # the engine finds no token for it, which its author is told
            logger.warning("a task has a grammar that cannot be followed", extra={"request_id": task.request})

    async def _wait_for_room(self) -> None:
        while self._is_asking() or not self._has_room():
            self._room.clear()
            with contextlib.suppress(TimeoutError):  # nobody tells when an author begins to be late
                async with asyncio.timeout(BIND_USUAL_S if self._asked else None):
                    await self._room.wait()

    def _is_asking(self) -> bool:
        """Whether an answer may come any moment."""
        late_since = time.monotonic() - BIND_USUAL_S
        late = {author for author, asked_at in self._asked.values() if asked_at <= late_since}
        return len(self._asked) >= MAX_ASKED or any(author not in late for author, _ in self._asked.values())

    async def _claim(self) -> Delivery | None:
        self._is_claiming = True
        try:
            delivery = await self._tasks.claim(self._worker, self._epoch, CLAIM_BLOCK_S)
        except BrokerUnavailable as error:
            logger.warning("cannot claim prefill tasks: %s", error)
            await self._retry.pause()
            return None
        finally:
            self._is_claiming = False
        self._retry.succeed()
        if delivery is not None:
            self._claims[delivery.entry] = (self._clock(), delivery)
        return delivery

    async def _ask(self, delivery: Delivery) -> None:
        try:
            await self.take(delivery)
        except BrokerUnavailable as error:
            logger.warning("cannot look for the author of a task: %s", error)
        finally:
            del self._asked[delivery.entry]
            self.touch()

    async def _author(self, delivery: Delivery) -> WorkerRecord | None:
        task = delivery.task
        record = self._peers.find(task.author, task.author_epoch)
        if record is None:  # it may have registered a moment ago
            await self._peers.refresh()
            record = self._peers.find(task.author, task.author_epoch)
        return record

    async def _is_orphaned(self, delivery: Delivery) -> bool:
        return await self._author(delivery) is None and not self._peers.is_in_doubt

    async def _bind(self, delivery: Delivery, author: WorkerRecord) -> pb.BindReply | None:
        task = delivery.task
        request = pb.BindRequest(
            binding=pb.Binding(request=task.request, placement=task.placement, try_number=task.try_number),
            worker=self._worker,
            epoch=self._epoch,
            fingerprint=self._fingerprint,
            entry=delivery.entry,
        )
        stub = DecodeStub(self._channels.channel(author.address, author.epoch))
        try:
            return await reply_from(author.worker, stub.Bind(request, timeout=BIND_TIMEOUT_S))
        except PeerError as error:  # its author times out and publishes it again, or is gone
            logger.warning("cannot bind at %s", error, extra={"request_id": task.request})
            return None

    def _start(self, delivery: Delivery, author: WorkerRecord, reply: pb.BindReply) -> None:
        task = delivery.task
        try:
            ids = unpack_ids(reply.ids)
        except MalformedRecord as error:
            logger.warning("binding answered with %s", error, extra={"request_id": task.request})
            return
        if objection := self._limits.objection(task, ids):  # its author hears at its next renewal that nobody holds it
            details = {"request_id": task.request}
            logger.warning("%s sent what cannot be computed: %s", author.worker, objection, extra=details)
            return
        wanted = range(reply.first_block, reply.first_block + reply.num_blocks)
        shown = tuple(ids[task.num_prompt_tokens :])
        holding = Holding(task, delivery.entry, author, wanted, shown, reply.lease_s)
        if not self._holdings.add(holding):
            return
        self._follow(holding)
        arrival = next(self._arrivals)
        sequence = Sequence(
            holding.sequence, ids, task.num_prompt_tokens, task.sampling, arrival, cache_salt=task.cache_salt
        )
        self._submit(Admit(sequence))
