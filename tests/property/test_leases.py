"""Bindings between a decode worker and a prefill worker under a clock of the test and a link that loses, delays and
repeats what it carries, while either side goes away and comes back.

The model is the content of the prefill worker's pages. Whatever a pull accepts is what its request was prefilled with,
however long ago the pages were let go. A lease never ends at the prefill worker while its decode worker still counts on
it, what nobody counts on is let go within a lease, and in the end every page is free.

Kills the planted bugs GEN_LATE, grantor-first and lease-unreaped.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.cache.pool import BlockPool
from common.messages.ids import BlockId, EntryId, Epoch, PlacementNumber, RequestId, TryNumber, WorkerId
from common.messages.registry import Role, WorkerRecord
from common.rpc.channels import Channels
from common.scheduling.sequence import SequenceKey
from decode_worker import releases as releases_module
from decode_worker.first_token import FirstToken
from decode_worker.reception import Attempt, Commit, Reception, TryLoss
from decode_worker.releases import Leases, Releases, binding
from prefill_worker.core import Command, Release
from prefill_worker.holdings import BindingKey, Holding, Holdings, Outcome, key_for
from prefill_worker.servicer import LeaseServicer
from tests.support.broker_records import make_task, worker_record
from tests.support.lossy_link import Link
from tests.support.virtual_time import VirtualLoop

LEASE_S = 6.0
REAP_S = 0.5
NUM_BLOCKS = 3
NUM_PAGES = 1
"""Of each prompt."""
MAX_DELAY_S = 1.5
"""Longer than a call waits for its answer."""
BIND_S = 2.0
LATEST_S = LEASE_S + REAP_S + 2 * MAX_DELAY_S + BIND_S
"""After this time both sides agree again."""

durations = st.sampled_from([0.1, 1.0, 3.0, 7.0, 13.0])


class Grantor:
    """One incarnation of the prefill worker: real holdings and pool, and what stands in the pages."""

    def __init__(self, epoch: Epoch, clock: Callable[[], float], on_ended: Callable[[Holding], None]) -> None:
        self.record = worker_record("prefill-0", epoch, role=Role.PREFILL)
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.holdings = Holdings(self._obey, on_ended, clock)
        self.servicer = LeaseServicer(epoch, self.holdings, lambda: False)
        self.pages: dict[BindingKey, list[BlockId]] = {}
        self.content: list[BindingKey | None] = [None] * NUM_BLOCKS

    def hold(self, holding: Holding) -> None:
        """Compute a prompt at once, if there is room."""
        taken = self.pool.take(NUM_PAGES)
        if taken is None:
            self.holdings.end(holding.key)
            return
        self.pages[holding.key] = taken
        for page in taken:
            self.content[page] = holding.key

    def references(self, key: BindingKey) -> list[tuple[BlockId, int]]:
        return [(page, self.pool.generation(page)) for page in self.pages.get(key, [])]

    def _obey(self, command: Command) -> None:
        assert isinstance(command, Release)
        self.pool.release(self.pages.pop(key_for(command.key), []))


@dataclass
class Prompt:
    """One request at the decode worker, and what it knows of the pages of its present try."""

    reception: Reception
    grantor: Grantor | None = None
    references: list[tuple[BlockId, int]] = field(default_factory=list)
    num_tries: int = 0
    missing_since: float | None = None
    """When its present try was first seen to be held by nobody."""
    has_slept: bool = False
    """Whether its decode worker was paused during the present try."""

    @property
    def key(self) -> BindingKey:
        """What the prefill worker calls the present try."""
        return BindingKey(self.reception.key.request, PlacementNumber(1), TryNumber(self.num_tries))

    @property
    def attempt(self) -> Attempt | None:
        return self.reception.attempt

    @property
    def is_under_way(self) -> bool:
        return self.attempt is not None and not self.attempt.outcome.done()

    @property
    def is_bound(self) -> bool:
        return self.attempt is not None and self.attempt.source is not None


class LeaseMachine(RuleBasedStateMachine):
    """`over_at` is when a try was over for the decode worker, by its key."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(releases_module, "stub_for", self._stub)
        self.link = Link(random.Random(0))
        self.prompts: list[Prompt] = []
        self.over_at: dict[BindingKey, float] = {}
        self.grantors: dict[Epoch, Grantor] = {}
        self.grantor = self._start_grantor()
        channels, epoch = cast(Channels, None), Epoch(5)
        self.releases = Releases(channels, epoch)
        self.leases = Leases(
            channels, WorkerId("decode-0"), epoch, LEASE_S, self._attempts, self._is_listed, self._awake_s
        )
        self.paused_s = 0.0
        self.renewing = self.loop.create_task(self.leases.run())
        self.running = [self.loop.create_task(work) for work in (self.releases.run(), self._reap())]

    @rule(
        seed=st.integers(0, 1000),
        loss=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        refusal=st.sampled_from([0.0, 0.0, 0.0, 0.7]),
        delay_s=st.sampled_from([0.01, 0.4, MAX_DELAY_S]),
        seconds=durations,
    )
    def weather(self, seed: int, loss: float, refusal: float, delay_s: float, seconds: float) -> None:
        self.link.dice.seed(seed)
        self.link.loss, self.link.refusal, self.link.delay_s, self.link.repeats = loss, refusal, delay_s, loss / 2
        self.loop.pass_time(seconds)

    @rule(seconds=durations)
    def wait(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    @precondition(lambda self: len(self.prompts) < 8)
    @rule()
    def begin(self) -> None:
        key = SequenceKey(RequestId(str(len(self.prompts))), PlacementNumber(1))
        blocks = [BlockId(number) for number in range(NUM_PAGES)]
        prompt = Prompt(Reception(key, b"", frozenset(), 0, blocks, self._awake_s))
        self.prompts.append(prompt)
        self._try(prompt)
        self.loop.pass_time(0.1)

    @rule(index=st.integers(0, 2))
    def try_again(self, index: int) -> None:
        """As the receiver does when a try is lost."""
        prompt = self._prompt(index)
        if prompt is not None and not prompt.is_under_way:
            self._try(prompt)

    @rule(index=st.integers(0, 2), is_told=st.booleans())
    def cancel(self, index: int, is_told: bool) -> None:
        """As a client does who leaves; the prefill worker may not hear of it."""
        prompt = self._prompt(index)
        if prompt is not None and prompt.attempt is not None:
            prompt.attempt.lose(TryLoss.OVER, "cancelled")
            if is_told:
                self._end(prompt)

    @rule(index=st.integers(0, 2), seconds=st.sampled_from([0.0, 0.5, 8.0]))
    def pull(self, index: int, seconds: float) -> None:
        """Pull announced pages; the copy takes its time, the pages may change under it."""
        prompt = self._prompt(index)
        if prompt is None or not prompt.is_under_way or not prompt.references:
            return
        self.loop.run_until_complete(self._pull(prompt, seconds))

    @rule(seconds=durations)
    def pause_decode_worker(self, seconds: float) -> None:
        """Its clock stands still; when it wakes up, it may believe in leases that are over."""
        self.renewing.cancel()
        for prompt in self.prompts:
            prompt.has_slept = True
        self.loop.pass_time(seconds)
        self.paused_s += seconds
        self.renewing = self.loop.create_task(self.leases.run())

    @rule()
    def restart_prefill_worker(self) -> None:
        self.grantor = self._start_grantor()

    @invariant()
    def what_nobody_counts_on_is_let_go(self) -> None:
        now = self.loop.time()
        for key in self.grantor.pages:
            over_s = now - self.over_at.get(key, now)
            assert over_s <= LATEST_S, f"{key} is held for nobody since {over_s} s"

    @invariant()
    def what_is_not_held_is_given_up(self) -> None:
        now = self._awake_s()
        for prompt in self.prompts:
            if not prompt.is_under_way or prompt.key in self.grantor.pages:
                prompt.missing_since = None
                continue
            prompt.missing_since = now if prompt.missing_since is None else prompt.missing_since
            assert not prompt.is_bound or now <= prompt.missing_since + LATEST_S, f"{prompt.key} waits for nobody"

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.grantor.pool.check()
        owned = [page for pages in self.grantor.pages.values() for page in pages]
        assert len(owned) == len(set(owned)) == self.grantor.pool.num_referenced

    def teardown(self) -> None:
        self.link.loss, self.link.refusal, self.link.delay_s, self.link.repeats = 0.0, 0.0, 0.01, 0.0
        for prompt in self.prompts:
            self._end(prompt)
        self.loop.pass_time(2 * LEASE_S)
        assert not [task for task in (*self.running, self.renewing) if task.done()]
        assert len(self.grantor.holdings) == 0
        assert self.grantor.pool.num_free == NUM_BLOCKS
        self.patch.undo()
        self.loop.end()
        asyncio.set_event_loop(None)

    def _prompt(self, index: int) -> Prompt | None:
        """Return one of the newest."""
        return self.prompts[-1 - index] if index < len(self.prompts) else None

    def _attempts(self) -> list[tuple[SequenceKey, Attempt]]:
        """Return what the receiver would: the bound tries under way."""
        found = [(prompt.reception.key, prompt.attempt) for prompt in self.prompts if prompt.is_under_way]
        return [(key, attempt) for key, attempt in found if attempt is not None and attempt.source is not None]

    def _awake_s(self) -> float:
        """Return the clock of the decode worker."""
        return self.loop.time() - self.paused_s

    def _is_listed(self, record: WorkerRecord) -> bool:
        return record.epoch == self.grantor.record.epoch

    def _start_grantor(self) -> Grantor:
        epoch = Epoch(len(self.grantors) + 1)
        self.grantors[epoch] = Grantor(epoch, self.loop.time, self._note_ended)
        return self.grantors[epoch]

    def _stub(self, channels: Channels, record: WorkerRecord) -> SimpleNamespace:
        """Return a client of whoever listens at that address now."""

        async def renew(request: Any) -> Any:
            return await self.grantor.servicer.Renew(request, cast(Any, None))

        async def release(request: Any) -> Any:
            return await self.grantor.servicer.Release(request, cast(Any, None))

        return SimpleNamespace(
            Renew=lambda request, timeout: self.link.call(renew, request, timeout),
            Release=lambda request, timeout: self.link.call(release, request, timeout),
        )

    def _try(self, prompt: Prompt) -> None:
        """Publish the next try and let the prefill worker claim it."""
        prompt.num_tries += 1
        key = prompt.key

        async def begin() -> Attempt:
            return prompt.reception.begin(TryNumber(prompt.num_tries))

        def note(outcome: asyncio.Future[Commit]) -> None:
            outcome.exception()  # seen
            self.over_at[key] = self.loop.time()

        attempt = self.loop.run_until_complete(begin())
        attempt.outcome.add_done_callback(note)
        prompt.grantor, prompt.references, prompt.missing_since, prompt.has_slept = self.grantor, [], None, False
        self.loop.create_task(self._bind(prompt, attempt, self.grantor))

    async def _bind(self, prompt: Prompt, attempt: Attempt, grantor: Grantor) -> None:
        """Live the prefill worker's side of a binding: ask, hold, compute, announce."""
        key = prompt.key

        async def answer(_: object) -> bool:
            name = binding(prompt.reception.key, attempt.number)
            return prompt.reception.current(name) is attempt and attempt.bind(grantor.record)

        with grantor.holdings.binding(key):
            try:
                is_bound = await self.link.call(answer, None, BIND_S)
            except grpc.aio.AioRpcError:
                return
            if not is_bound or self.grantor is not grantor:
                return
            task = make_task(key.request, attempt.number)
            holding = Holding(task, EntryId("1-0"), worker_record(), range(NUM_PAGES), (), LEASE_S)
            if not grantor.holdings.add(holding):
                return
        grantor.hold(holding)
        if attempt is prompt.attempt:
            prompt.references = grantor.references(key)

    async def _pull(self, prompt: Prompt, seconds: float) -> None:
        attempt, grantor, references = prompt.attempt, prompt.grantor, prompt.references
        assert attempt is not None
        assert grantor is not None
        wanted = prompt.key
        if grantor is not self.grantor:
            attempt.lose(TryLoss.DIED, "another epoch serves there")
            self._end(prompt)
            return
        copied = [grantor.content[page] for page, _ in references]
        await asyncio.sleep(seconds)
        is_fresh = all(grantor.pool.generation(page) == generation for page, generation in references)
        if not is_fresh or self.grantor is not grantor or prompt.attempt is not attempt or attempt.outcome.done():
            return
        assert copied == [wanted] * NUM_PAGES, "another prompt's pages were accepted"
        attempt.arrive(range(NUM_PAGES))
        attempt.take_commit(Commit(FirstToken(1)), is_last=False)
        assert attempt.outcome.done()
        self._end(prompt)

    def _end(self, prompt: Prompt) -> None:
        """As the receiver does when a try is over, won or lost."""
        attempt = prompt.attempt
        if attempt is None:
            return
        attempt.lose(TryLoss.OVER, "over")
        if attempt.source is not None:
            self.releases.add(attempt.source, prompt.reception.key, attempt.number)

    def _note_ended(self, holding: Holding) -> None:
        """A lease that ends by itself was given up by its decode worker before."""
        prompt = self.prompts[int(holding.key.request)]
        if holding.outcome is not Outcome.LEASE_EXPIRED or prompt.has_slept:
            return
        attempt = prompt.attempt
        assert attempt is not None
        counts_on_it = attempt.number == holding.key.try_number and not attempt.outcome.done()
        assert not counts_on_it, f"{holding.key} was let go before its decode worker has given it up"

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            self.grantor.holdings.reap()


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=3 * settings().max_examples)
