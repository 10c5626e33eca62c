"""The decode worker's engine policy: where prompts are prefilled, and who owns pages that are being received."""

import pytest

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.ids import EntryId
from common.messages.registry import StepCost
from common.scheduling.emission import Emission
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import FinishReason, Sequence, SequenceKey
from decode_worker.core import (
    Absorb,
    Activate,
    Admit,
    Begun,
    Cancel,
    DecodeCore,
    Event,
    FallBack,
    LetGo,
    Placed,
    Refused,
    Reserved,
)
from decode_worker.first_token import FirstToken
from decode_worker.placing import Backlog, Bounds, Decision, Place, Placing, Reason, There
from decode_worker.scheduler import DecodeScheduler
from tests.support.sequences import key, sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 10
LOCAL_MAX = 5
BOUNDS = Bounds(chunk_size=32, token_budget=32, itl_target_s=1.0)


class Core:
    """A decode core whose steps sample the token 7."""

    def __init__(self, local_max: int = LOCAL_MAX) -> None:
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        prefix = PrefixCache(self.pool, BLOCK_SIZE, "fingerprint")
        scheduler = DecodeScheduler(
            self.pool, prefix, block_size=BLOCK_SIZE, max_sequences=4, token_budget=32, chunk_size=32, max_context=40
        )
        self.core = DecodeCore(scheduler, self.pool, prefix, BLOCK_SIZE, Placing(BOUNDS, local_max))
        self.scheduler = scheduler
        self.begun: list[SequenceKey] = []

        self.decisions: list[Decision] = []

    def admit(self, one: Sequence, *, may_go_remote: bool = True, there: There | None = None) -> list[Event]:
        events = list(self.core.obey(Admit(one, may_go_remote, there=there)))
        self.decisions += [event.decision for event in events if isinstance(event, Placed)]
        return [event for event in events if not isinstance(event, Placed)]

    def step(self, run_s: float = 0.0) -> list[Event]:
        plan, events = self.core.plan()
        tokens = {chunk.sequence.key: 7 for chunk in plan.chunks if chunk.samples}
        events = [*events, *self.core.settle(plan, StepResult(tokens, run_s=run_s))]
        self.begun += [event.key for event in events if isinstance(event, Begun)]
        return [event for event in events if not isinstance(event, Begun)]

    def reserve_beside(self, name: str, arrival: int) -> Reserved:
        """Reserve pages while others run."""
        self.admit(sequence(name, range(20), arrival=arrival))
        (event,) = [event for event in self.step() if isinstance(event, Reserved)]
        return event

    def reserve(self, name: str, num_tokens: int = 20, max_tokens: int = 5) -> Reserved:
        self.admit(sequence(name, range(num_tokens), max_tokens=max_tokens))
        (event,) = self.step()
        assert isinstance(event, Reserved)
        return event

    @property
    def is_idle(self) -> bool:
        load = self.core.load(0)
        self.pool.check()
        return load.blocks_free == NUM_BLOCKS and load.num_running + load.num_waiting + load.num_reserved == 0


def test_a_short_prompt_stays_here() -> None:
    core = Core()
    core.admit(sequence("short", range(LOCAL_MAX)))
    assert isinstance(core.step()[0], Emission)
    core = Core()
    assert core.reserve("long", LOCAL_MAX + 1).first_block == 0


def test_what_counts_is_the_uncached_part() -> None:
    core = Core()
    core.admit(sequence("first", range(20), max_tokens=1), may_go_remote=False)
    core.step()
    core.admit(sequence("second", range(20)))
    (event,) = core.step()
    assert isinstance(event, Emission)
    assert event.num_cached == 16


def test_nothing_goes_elsewhere_unless_it_may() -> None:
    core = Core()
    core.admit(sequence("long", range(20)), may_go_remote=False)
    assert isinstance(core.step()[0], Emission)


def test_a_measured_prefill_worker_gets_what_it_computes_sooner() -> None:
    core = Core()
    for number in range(4):  # steps of 0.1 s
        core.admit(sequence(str(number), [number] * 20, arrival=number, max_tokens=1), may_go_remote=False)
        core.step(run_s=0.1)
    fast, slow = There(StepCost(0.001, 0.0001, 0.0)), There(StepCost(0.2, 0.01, 0.0))
    core.admit(sequence("slow there", range(50, 70), arrival=9), there=slow)
    core.admit(sequence("fast there", range(70, 90), arrival=10), there=fast)
    reasons = [(decision.place, decision.reason) for decision in core.decisions[-2:]]
    assert reasons == [(Place.HERE, Reason.COST), (Place.THERE, Reason.COST)]
    assert core.decisions[-1].num_tokens == 20


def test_what_was_sent_away_counts_before_a_heartbeat_tells_it() -> None:
    core = Core()
    there = There(StepCost(0.001, 0.0001, 0.0), backlog=Backlog(0, 0))
    core.admit(sequence("first", range(20)))
    core.admit(sequence("second", range(20, 40), arrival=1), there=there)
    (_, second) = core.decisions
    assert second.there is not None
    assert second.there.first_token_s == pytest.approx(2 * 0.001 + 0.0001 * (20 + 20))


def test_a_step_that_was_measured_is_told_with_the_load() -> None:
    core = Core()
    assert core.core.load(0).step_cost is None
    core.admit(sequence("a", range(30), max_tokens=9), may_go_remote=False)
    assert core.core.load(0).num_uncomputed == 30
    for _ in range(3):
        core.step(run_s=0.25)
    load = core.core.load(3)
    assert load.num_uncomputed == 0
    assert load.step_cost is not None
    assert load.step_cost.step_s(1, 32) == pytest.approx(0.25, rel=0.01)


def test_the_span_that_is_missing_is_lent() -> None:
    core = Core()
    core.admit(sequence("first", range(8), max_tokens=1), may_go_remote=False)
    core.step()
    reserved = core.reserve("second", 20)
    assert (reserved.first_block, len(reserved.block_ids)) == (2, 3)
    assert core.core.load(0).num_reserved == 1
    assert core.core.load(0).blocks_free == NUM_BLOCKS - 5


def test_b036_a_cancelled_sequence_keeps_its_pages_until_they_are_let_go() -> None:
    core = Core()
    reserved = core.reserve("a")
    core.core.obey(Cancel(key("a")))
    assert core.core.load(0).num_reserved == 0
    assert core.pool.num_free == NUM_BLOCKS - len(reserved.block_ids)
    assert not set(core.pool.take(core.pool.num_free) or ()) & set(reserved.block_ids)
    core.core.obey(LetGo(key("a")))
    assert core.pool.num_free == len(reserved.block_ids)


def test_letting_go_twice_or_of_nothing_changes_nothing() -> None:
    core = Core()
    core.reserve("a")
    for _ in range(2):
        core.core.obey(LetGo(key("a")))
        core.core.obey(LetGo(key("never seen")))
    core.core.obey(Cancel(key("a")))
    assert core.is_idle


def test_pages_that_were_let_go_first_stay_with_their_sequence() -> None:
    core = Core()
    reserved = core.reserve("a")
    core.core.obey(LetGo(key("a")))
    assert core.pool.num_free == NUM_BLOCKS - len(reserved.block_ids)
    core.core.obey(Cancel(key("a")))
    assert core.is_idle


def test_activation_emits_the_first_token_and_decoding_goes_on() -> None:
    core = Core()
    core.reserve("a", max_tokens=2)
    (first,) = core.core.obey(Activate(key("a"), FirstToken(5, 12)))
    assert isinstance(first, Emission)
    assert (first.token_ids, first.index, first.finish, first.num_cached) == ((5,), 0, None, 12)
    core.core.obey(LetGo(key("a")))
    (last,) = core.step()
    assert isinstance(last, Emission)
    assert (last.token_ids, last.finish) == ((7,), FinishReason.LENGTH)
    assert core.is_idle


def test_b051_a_first_token_that_is_the_last_one() -> None:
    core = Core()
    core.admit(sequence("a", range(20), stop_ids=(5,)))
    core.step()
    (only,) = core.core.obey(Activate(key("a"), FirstToken(5, 0)))
    assert isinstance(only, Emission)
    assert only.finish is FinishReason.STOP
    core.core.obey(LetGo(key("a")))
    assert core.is_idle
    assert core.pool.num_cached == 0  # what has come of its pages was never complete


def test_b051_one_token_lends_nothing() -> None:
    core = Core()
    reserved = core.reserve("a", max_tokens=1)
    assert reserved.block_ids == ()
    assert core.pool.num_free == NUM_BLOCKS
    (only,) = core.core.obey(Activate(key("a"), FirstToken(5, 0)))
    assert isinstance(only, Emission)
    assert only.finish is FinishReason.LENGTH
    core.core.obey(LetGo(key("a")))
    assert core.is_idle


def test_falling_back_computes_on_the_same_pages() -> None:
    core = Core()
    reserved = core.reserve("a", max_tokens=1 + 1)
    core.core.obey(FallBack(key("a")))
    core.core.obey(LetGo(key("a")))
    plan, _ = core.core.plan()
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(0, 20)]
    assert tuple(plan.chunks[0].sequence.block_ids) == reserved.block_ids


def test_falling_back_alone_gives_the_pages_back_and_waits_for_the_others() -> None:
    core = Core()
    core.admit(sequence("other", range(100, 120), max_tokens=3), may_go_remote=False)
    reserved = core.reserve_beside("a", arrival=1)
    core.core.obey(FallBack(key("a"), alone=True))
    load = core.core.load(0)
    assert (load.num_waiting, load.num_quarantined, load.is_exclusive) == (1, len(reserved.block_ids), True)
    core.core.obey(LetGo(key("a")))
    assert core.core.load(0).num_quarantined == 0
    while core.core.load(0).num_running:
        assert {emission.key for emission in core.step() if isinstance(emission, Emission)} == {key("other")}
    assert {emission.key for emission in core.step() if isinstance(emission, Emission)} == {key("a")}
    core.core.obey(Cancel(key("a")))
    assert not core.core.load(0).is_exclusive
    assert core.is_idle


def test_a_suspect_that_is_over_displaces_nobody() -> None:
    core = Core()
    core.reserve("a")
    core.core.obey(Cancel(key("a")))
    core.reserve_beside("b", arrival=1)
    assert list(core.core.obey(FallBack(key("a"), alone=True))) == []


def test_a_suspect_never_goes_elsewhere() -> None:
    core = Core()
    core.admit(sequence("a", range(20), runs_alone=True))
    assert isinstance(core.step()[0], Emission)


def test_the_accounts_are_checked() -> None:
    core = Core()
    reserved = core.reserve("a")
    core.admit(sequence("b", range(100, 104), arrival=1), may_go_remote=False)
    core.step()
    assert core.core.check() == []
    core.core.obey(Cancel(key("a")))
    assert core.core.check() == []  # what only a receiver owns is known, too
    core.pool.share(reserved.block_ids[:1])
    (text,) = core.core.check()
    assert str(reserved.block_ids[0]) in text
    core.pool.release(reserved.block_ids[:1])
    running = core.scheduler.sequence(key("b"))
    assert running is not None
    running.block_ids.append(reserved.block_ids[1])  # which it does not own
    assert core.core.check()


def test_b054_what_comes_for_a_sequence_that_is_over_changes_nothing() -> None:
    core = Core()
    core.reserve("a")
    core.core.obey(Cancel(key("a")))
    assert list(core.core.obey(Activate(key("a"), FirstToken(5, 0)))) == []
    assert list(core.core.obey(FallBack(key("a")))) == []
    assert list(core.core.obey(Cancel(key("a")))) == []
    core.core.obey(LetGo(key("a")))
    assert core.is_idle


def test_a_sequence_that_never_fits_is_refused() -> None:
    core = Core()
    (refused,) = core.admit(sequence("a", range(45)))
    assert isinstance(refused, Refused)
    assert "40" in refused.reason
    assert core.is_idle


def test_the_newest_absorbed_job_is_told() -> None:
    core = Core()
    assert core.core.load(0).absorbed is None
    core.core.obey(Absorb(EntryId("5-1")))
    assert core.core.load(3).absorbed == "5-1"
    assert core.core.load(3).num_steps == 3


def test_what_is_promised_to_choices_is_not_free_for_others() -> None:
    core = Core()
    leader, *followers = (sequence("r", range(20), choice=choice, max_tokens=9) for choice in range(3))
    core.core.obey(Admit(leader, True, tuple(followers)))
    core.step()
    assert core.core.load(0).blocks_free == NUM_BLOCKS - 5 - 2 * 2  # each goes on in a copy of the last one
    core.core.obey(Activate(leader.key, FirstToken(7)))
    core.core.obey(LetGo(leader.key))
    core.step()
    assert core.core.load(0).blocks_free == core.pool.num_free
    while core.scheduler.num_running:
        core.step()
    assert core.is_idle


def test_a_reservation_that_waits_for_pages_is_told_when_it_has_them() -> None:
    core = Core()
    core.reserve("a", 30)
    core.admit(sequence("b", range(100, 120), arrival=1))
    assert core.step() == []
    core.core.obey(Cancel(key("a")))
    assert core.step() == []  # a receiver may still write into those pages
    core.core.obey(LetGo(key("a")))
    (reserved,) = core.step()
    assert isinstance(reserved, Reserved)
    assert reserved.key == key("b")


def test_an_empty_plan_settles_to_nothing() -> None:
    core = Core()
    assert list(core.core.settle(StepPlan(), StepResult({}))) == []
