"""Decode scheduler: whatever is batched, preempted, received, cancelled or failed, every stream is its solo output.

A runner without a model checks what each step attends to (`PagedContent`). Kills these planted bugs (each was planted
and found): decoding or publishing before pages are complete; a preempted sequence that keeps `num_computed`; preempting
an older sequence; younger ones that overtake; no watermark; an over-full batch or budget; a limit that ends a
stream one token early or late; a wrong index or chain; a failed sequence that stays cached; blocks lost on any exit;
company for a sequence that runs alone, before it, beside it or by falling back; a lone sequence that is overtaken.

Requests have up to four choices, some of them with tokens that an earlier placement has shown. More planted bugs that
it finds: a leader that is admitted without room for its followers; followers forgotten with their leader, called before
its prompt is complete, or left behind when one of them fails; a partial block that is shared, or copied too late;
logprobs of the prompt that are incomplete, told twice or by a follower.

Kills the planted bugs CANCEL_ONE, RESERVE_LATE, SHARE_PARTIAL, age-forgotten, called-too-early,
cancelled-reservation-cached, copied-late, evicted-but-known, failure-of-one, followers-orphaned, head-overtaken,
hit-unpinned, oldest-preempted, pages-taken-during-a-step, pages-unneeded, planned-without-pages,
preemption-loses-tokens, promise-beyond-the-pool, promise-broken, published-when-reserved, shown-at-once and uncopied.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.decode_model import DecodeModel
from tests.support.decode_requests import CAPACITY, NUM_BLOCKS, REQUESTS, Request

MAX_CONTEXT = 24
STEPS_TO_DRAIN = 10_000


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        max_sequences=st.integers(2, 5),
        spare_budget=st.integers(0, 8),
        chunk_size=st.integers(1, 5),
        max_preemptions=st.sampled_from([0, 1, 8]),
        max_context=st.sampled_from([MAX_CONTEXT, CAPACITY - 3]),
    )
    def build(
        self, max_sequences: int, spare_budget: int, chunk_size: int, max_preemptions: int, max_context: int
    ) -> None:
        token_budget = max_sequences + spare_budget
        self.model = DecodeModel(max_sequences, token_budget, chunk_size, max_preemptions, max_context)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self.model.add(request)

    @rule(count=st.sampled_from([1, 3, 8]))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            plan = self.model.plan()
            if plan:
                self.model.settle(plan, self.model.runner.run(plan, self.model.live()))

    @rule(data=st.data())
    def meet_nan(self, data: st.DataObject) -> None:
        """One row of a step comes out as NaN: it fails, its blocks are never hit again, the others go on."""
        plan = self.model.plan()
        if not plan:
            return
        victim = data.draw(st.sampled_from(plan.chunks)).sequence
        blocks = set(victim.block_ids)
        emissions = self.model.settle(plan, self.model.runner.run(plan, self.model.live(), frozenset({victim.key})))
        assert not self.model.choices(victim.key), "a choice that fails ends them all"
        if all(emission.key != victim.key for emission in emissions):
            return  # another choice had failed in planning
        found = self.model.prefix.match(victim.token_ids, victim.hash_chain, victim.num_tokens)
        assert not blocks & set(found)
        self.model.pool.release(found)

    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        plan = self.model.plan()
        if not plan:
            return
        result = self.model.runner.run(plan, self.model.live())
        self.model.cancel(data.draw(st.sampled_from(plan.chunks)).sequence.key)
        self.model.settle(plan, result)

    @precondition(lambda self: self.model.reserved())
    @rule(data=st.data(), length=st.integers(1, 8))
    def receive(self, data: st.DataObject, length: int) -> None:
        """Some pages of a reserved sequence arrive."""
        stream = data.draw(st.sampled_from(self.model.reserved()))
        self.model.receive(stream, range(stream.sequence.num_computed, stream.sequence.num_tokens)[:length])

    @precondition(lambda self: self.model.reserved())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """The first token arrives, and the pages, if they are needed."""
        stream = data.draw(st.sampled_from(self.model.reserved()))
        self.model.commit(stream)

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data(), alone=st.booleans())
    def fall_back(self, data: st.DataObject, alone: bool) -> None:
        self.model.fall_back(self.model.streams[data.draw(st.sampled_from(sorted(self.model.streams)))], alone=alone)

    @precondition(lambda self: self.model.reserved())
    @rule(data=st.data())
    def lose_every_try(self, data: st.DataObject) -> None:
        self.model.fall_back(data.draw(st.sampled_from(self.model.reserved())), alone=True)

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.model.cancel(data.draw(st.sampled_from(sorted(self.model.streams))))

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data())
    def cancel_all(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.streams)))
        for stream in self.model.choices(key):
            self.model.drop(stream)
        self.model.scheduler.cancel_all(key.of_placement)
        self.model.scheduler.cancel_all(key.of_placement)

    @precondition(lambda self: self.model.streams)
    @rule(data=st.data())
    def cancel_leader(self, data: st.DataObject) -> None:
        leaders = sorted(self.model.groups[key.request].leader.sequence.key for key in self.model.streams)
        key = data.draw(st.sampled_from(leaders))
        if key in self.model.streams:
            self.model.cancel(key)

    @precondition(lambda self: self.model.receivers)
    @rule(writes=st.booleans())
    def end_late_receiver(self, writes: bool) -> None:
        """A copy whose sequence is gone ends; its last write may come late, but only into pages it still owns."""
        self.model.end_late_receiver(writes=writes)

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        """Everything ends, with the right tokens, and every block comes back."""
        if not hasattr(self, "model"):
            return
        model = self.model
        for _ in range(STEPS_TO_DRAIN):
            while model.receivers:
                model.end_late_receiver(writes=False)
            for stream in model.reserved():
                model.commit(stream)
            if not model.streams:
                break
            plan = model.plan()
            assert plan or model.reserved(), "nothing to run, nothing to wait for, and yet not done"
            if plan:
                model.settle(plan, model.runner.run(plan, model.live()))
        assert not model.streams, "does not end"
        model.pool.check()
        assert model.pool.num_free == NUM_BLOCKS
        assert model.scheduler.num_running == model.scheduler.num_waiting == model.scheduler.num_reserved == 0


TestDecodeScheduler = DecodeMachine.TestCase
