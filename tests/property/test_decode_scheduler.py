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

Kills the planted bugs age-forgotten, cancelled-reservation-cached, evicted-but-known, head-overtaken, hit-unpinned,
oldest-preempted, pages-taken-during-a-step, planned-without-pages, preemption-loses-tokens and published-when-reserved.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.messages.chain import chain_of
from common.messages.ids import BlockId, ChoiceIndex, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import FinishReason, Sequence, SequenceKey
from decode_worker.first_token import FirstToken
from decode_worker.scheduler import DecodeScheduler
from decode_worker.ticket import Intake
from tests.support.likelihoods import likelihood
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, next_token, solo_output

BLOCK_SIZE = 2
NUM_BLOCKS = 8
CAPACITY = BLOCK_SIZE * NUM_BLOCKS
MAX_CONTEXT = 24
STEPS_TO_DRAIN = 10_000


@dataclass(frozen=True)
class Request:
    """`shown` says how many tokens of each open choice an earlier placement has shown."""

    prompt: list[int]
    shown: dict[int, int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    salt: str
    wants: Intake
    is_failover: bool
    runs_alone: bool
    asks: bool
    """For logprobs, of the prompt as well."""


REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6)
    | st.lists(st.integers(0, 1), min_size=7, max_size=CAPACITY + 2),
    shown=st.builds(dict, st.just({0: 0}))
    | st.dictionaries(st.integers(0, 3), st.just(0) | st.integers(0, 3) | st.integers(0, 9), min_size=1, max_size=4),
    max_tokens=st.sampled_from([1, 2, 20]),
    stop_ids=st.sampled_from([(), (), (0,), (1, 2)]),
    salt=st.sampled_from(["", "", "", "a"]),
    wants=st.sampled_from([Intake.LOCAL, Intake.LOCAL, Intake.REMOTE]),
    is_failover=st.booleans(),
    runs_alone=st.sampled_from([False, False, True]),
    asks=st.booleans(),
)


@dataclass
class Stream:
    """What one client has been told, and what it must be told in the end."""

    sequence: Sequence
    wants: Intake
    expected: list[int]
    reason: FinishReason
    shown: list[int] = field(default_factory=list)
    is_reserved: bool = False
    receiving: list[BlockId] = field(default_factory=list)

    @property
    def age(self) -> tuple[int, int]:
        return self.sequence.arrival, self.sequence.key.choice

    @property
    def num_own(self) -> int:
        """Blocks that a choice has to have for itself, for its tokens and one more."""
        num_tokens, num_prompt = self.sequence.num_tokens, self.sequence.num_prompt
        return -(-(num_tokens + 1) // BLOCK_SIZE) - min(num_prompt, num_tokens - 1) // BLOCK_SIZE

    @property
    def num_to_begin(self) -> int:
        """As many of these as it needs for the prompt and one more token."""
        num_tokens, num_prompt = self.sequence.num_tokens, self.sequence.num_prompt
        return -(-(num_prompt + 1) // BLOCK_SIZE) - min(num_prompt, num_tokens - 1) // BLOCK_SIZE


@dataclass
class Group:
    """The choices of one request."""

    prompt: list[int]
    leader: Stream
    asks_prompt: bool
    has_prompt: bool = False
    """Whether the leader has computed it: until then the others follow."""


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
        self.max_sequences = max_sequences
        self.token_budget = max_sequences + spare_budget
        self.chunk_size = chunk_size
        self.max_preemptions = max_preemptions
        self.max_context = max_context
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "fingerprint")
        self.content = PagedContent(self.pool, BLOCK_SIZE)
        self.runner = ScriptedRunner(self.content)
        self.scheduler = DecodeScheduler(
            self.pool,
            self.prefix,
            block_size=BLOCK_SIZE,
            max_sequences=max_sequences,
            token_budget=self.token_budget,
            chunk_size=chunk_size,
            max_context=max_context,
            max_preemptions=max_preemptions,
        )
        self.streams: dict[SequenceKey, Stream] = {}
        self.groups: dict[RequestId, Group] = {}
        self.receivers: list[tuple[Sequence, list[BlockId]]] = []
        """Copies that outlived their sequence: they still own their pages and may write into them."""
        self.num_added = 0

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        self.num_added += 1
        asks_prompt = request.asks and not any(request.shown.values())
        streams = [
            self._stream(request, choice, asks_prompt=asks_prompt and choice == min(request.shown))
            for choice in sorted(request.shown)[: self.max_sequences]
        ]
        leader, *followers = [stream.sequence for stream in streams]
        wants = streams[0].wants
        must_refuse = any(
            max(len(request.prompt) + 1, one.num_tokens) > min(CAPACITY, self.max_context)
            or one.num_tokens >= self.max_context
            for one in (leader, *followers)
        )
        num_blocks = -(-leader.num_prompt // BLOCK_SIZE) + sum(stream.num_to_begin for stream in streams[1:])
        must_refuse |= len(streams) > 1 and num_blocks > NUM_BLOCKS
        try:
            self.scheduler.add(leader, wants, followers)
        except DoesNotFit:
            assert must_refuse
            return
        assert not must_refuse
        self.groups[leader.key.request] = Group(request.prompt, streams[0], asks_prompt)
        self.streams |= {stream.sequence.key: stream for stream in streams}

    def _stream(self, request: Request, choice: int, *, asks_prompt: bool) -> Stream:
        key = SequenceKey(RequestId(str(self.num_added)), PlacementNumber(1), choice=ChoiceIndex(choice))
        prompt, num_shown = request.prompt, request.shown[choice]
        shown = solo_output(prompt, (), num_shown, 1000, choice)[0] if num_shown else []
        max_tokens = max(request.shown.values()) + request.max_tokens
        sampling = SamplingParams(
            1,
            max_tokens,
            stop_ids=request.stop_ids,
            num_logprobs=0 if request.asks else None,
            num_prompt_logprobs=0 if asks_prompt else None,
        )
        arrival = 2 * self.num_added - (7 if request.is_failover else 0)
        token_ids = prompt + shown
        sequence = Sequence(key, token_ids, len(prompt), sampling, arrival, request.salt, request.runs_alone)
        is_leader = choice == min(request.shown)
        wants = request.wants if is_leader and not request.runs_alone else Intake.LOCAL
        max_held = min(self.max_context, CAPACITY + 1)
        expected, reason = solo_output(token_ids, request.stop_ids, max_tokens - num_shown, max_held, choice)
        return Stream(sequence, wants, shown + expected, reason, list(shown))

    @rule(count=st.sampled_from([1, 3, 8]))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            plan = self._plan()
            if plan:
                self._settle(plan, self.runner.run(plan, self._live()))

    @rule(data=st.data())
    def meet_nan(self, data: st.DataObject) -> None:
        """One row of a step comes out as NaN: it fails, its blocks are never hit again, the others go on."""
        plan = self._plan()
        if not plan:
            return
        victim = data.draw(st.sampled_from(plan.chunks)).sequence
        blocks = set(victim.block_ids)
        emissions = self._settle(plan, self.runner.run(plan, self._live(), frozenset({victim.key})))
        assert not self._choices(victim.key), "a choice that fails ends them all"
        if all(emission.key != victim.key for emission in emissions):
            return  # another choice had failed in planning
        found = self.prefix.match(victim.token_ids, victim.hash_chain, victim.num_tokens)
        assert not blocks & set(found)
        self.pool.release(found)

    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        plan = self._plan()
        if not plan:
            return
        result = self.runner.run(plan, self._live())
        self._cancel(data.draw(st.sampled_from(plan.chunks)).sequence.key)
        self._settle(plan, result)

    @precondition(lambda self: self._reserved())
    @rule(data=st.data(), length=st.integers(1, 8))
    def receive(self, data: st.DataObject, length: int) -> None:
        """Some pages of a reserved sequence arrive."""
        stream = data.draw(st.sampled_from(self._reserved()))
        self._receive(stream, range(stream.sequence.num_computed, stream.sequence.num_tokens)[:length])

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """The first token arrives, and the pages, if they are needed."""
        stream = data.draw(st.sampled_from(self._reserved()))
        self._commit(stream)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), alone=st.booleans())
    def fall_back(self, data: st.DataObject, alone: bool) -> None:
        self._fall_back(self.streams[data.draw(st.sampled_from(sorted(self.streams)))], alone=alone)

    @precondition(lambda self: self._reserved())
    @rule(data=st.data())
    def lose_every_try(self, data: st.DataObject) -> None:
        self._fall_back(data.draw(st.sampled_from(self._reserved())), alone=True)

    def _fall_back(self, stream: Stream, *, alone: bool) -> None:
        was_remote = stream.wants is Intake.REMOTE
        must_be_alone = stream.sequence.runs_alone or (alone and was_remote)
        self._stop_receiving(stream)
        assert self.scheduler.fall_back(stream.sequence.key, alone=alone) == was_remote
        assert {one.sequence.runs_alone for one in self._choices(stream.sequence.key)} == {must_be_alone}
        stream.is_reserved = False
        stream.wants = Intake.LOCAL

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(data.draw(st.sampled_from(sorted(self.streams))))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel_all(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.streams)))
        for stream in self._choices(key):
            self._drop(stream)
        self.scheduler.cancel_all(key.of_placement)
        self.scheduler.cancel_all(key.of_placement)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel_leader(self, data: st.DataObject) -> None:
        leaders = sorted(self.groups[key.request].leader.sequence.key for key in self.streams)
        key = data.draw(st.sampled_from(leaders))
        if key in self.streams:
            self._cancel(key)

    @precondition(lambda self: self.receivers)
    @rule(writes=st.booleans())
    def end_late_receiver(self, writes: bool) -> None:
        """A copy whose sequence is gone ends; its last write may come late, but only into pages it still owns."""
        sequence, blocks = self.receivers.pop(0)
        if writes:
            span = range(sequence.num_cached, sequence.num_tokens)
            self.content.write(sequence.token_ids, sequence.cache_salt, blocks, span)
        self.pool.release(blocks)

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        scheduler = self.scheduler
        assert scheduler.num_running + scheduler.num_reserved <= self.max_sequences
        assert scheduler.num_running + scheduler.num_reserved + scheduler.num_waiting == len(self.streams)
        assert scheduler.num_reserved == len(self._reserved())
        present = [stream for stream in self.streams.values() if stream.sequence.block_ids or stream.is_reserved]
        requests = {stream.sequence.key.request for stream in present}
        assert len(requests) <= 1 or not any(stream.sequence.runs_alone for stream in present), "company for a lone one"
        assert scheduler.is_exclusive == any(stream.sequence.runs_alone for stream in self.streams.values())
        owned = {block for stream in self.streams.values() for block in stream.sequence.block_ids}
        owned |= {block for _, blocks in self.receivers for block in blocks}
        assert self.pool.num_referenced == len(owned)
        copies = [blocks for _, blocks in self.receivers] + [stream.receiving for stream in self.streams.values()]
        assert scheduler.violations(copies) == []
        for key in self.streams:
            sequence = scheduler.sequence(key)
            assert sequence is self.streams[key].sequence
            assert sequence.num_preemptions <= self.max_preemptions

    def teardown(self) -> None:
        """Everything ends, with the right tokens, and every block comes back."""
        if not hasattr(self, "pool"):
            return
        for _ in range(STEPS_TO_DRAIN):
            while self.receivers:
                self.end_late_receiver(writes=False)
            for stream in self._reserved():
                self._commit(stream)
            if not self.streams:
                break
            plan = self._plan()
            assert plan or self._reserved(), "nothing to run, nothing to wait for, and yet not done"
            if plan:
                self._settle(plan, self.runner.run(plan, self._live()))
        assert not self.streams, "does not end"
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_reserved == 0

    def _plan(self) -> StepPlan:
        waiting = self._waiting()
        preemptions = {key: stream.sequence.num_preemptions for key, stream in self.streams.items()}
        running_before = [key for key, stream in self.streams.items() if stream.sequence.block_ids]
        running_before = [key for key in running_before if not self.streams[key].is_reserved]
        has_run = {key for key, stream in self.streams.items() if stream.sequence.num_preemptions}
        outcome = self.scheduler.admit()
        for sequence in outcome.reserved:
            stream = self.streams[sequence.key]
            assert stream.wants is Intake.REMOTE
            stream.is_reserved = True
            wants_more = sequence.sampling.max_tokens - sequence.num_generated > 1
            needs_pages = wants_more or bool(self._following(sequence.key))
            assert bool(sequence.block_ids) == needs_pages
            if needs_pages:
                self.content.verify(
                    sequence.token_ids, sequence.cache_salt, sequence.block_ids, range(sequence.num_computed)
                )
        left = self._waiting()
        admitted = [self.streams[key].sequence for key in waiting if key not in left]
        begun = {sequence.key for sequence in admitted if not self.streams[sequence.key].is_reserved} - has_run
        assert {sequence.key for sequence in outcome.begun} == begun
        for sequence in admitted:
            age = self.streams[sequence.key].age
            assert all(sequence.arrival <= self.streams[key].age[0] for key in left), "overtakes"
            assert all(age <= self.streams[key].age for key in left if key.request == sequence.key.request)
        self._check_promises([sequence for sequence in admitted if sequence.block_ids])
        plan = self.scheduler.plan()
        for sequence in admitted:
            assert sequence.num_preemptions == preemptions[sequence.key], (
                "admitted without room for a step of the others"
            )
        self._check_plan(plan)
        self._check_preemptions(preemptions, running_before)
        return plan

    def _check_promises(self, admitted: list[Sequence]) -> None:
        """There is room for whoever follows the youngest of those that were given pages, or somebody older."""
        if not admitted:
            return
        youngest = max((self.streams[sequence.key] for sequence in admitted), key=lambda stream: stream.age)
        own = self._following(youngest.sequence.key)
        of_others = [
            follower
            for key, stream in self.streams.items()
            if stream is not youngest and (stream.sequence.block_ids or stream.is_reserved)
            for follower in self._following(key)
            if follower.age < youngest.age
        ]
        num_own = min(sum(one.num_to_begin for one in own), NUM_BLOCKS - len(youngest.sequence.block_ids))
        assert num_own + sum(one.num_own for one in of_others) <= self.pool.num_free
        promised = [*own, *of_others]
        assert self.scheduler.num_running + self.scheduler.num_reserved + len(promised) <= self.max_sequences

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.token_budget
        keys = [chunk.sequence.key for chunk in plan.chunks]
        assert len(set(keys)) == len(keys)
        is_decoding = [chunk.start + 1 == chunk.sequence.num_tokens for chunk in plan.chunks]
        assert is_decoding == sorted(is_decoding, reverse=True), "a prompt chunk before a decoding sequence"
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert not self.streams[sequence.key].is_reserved
            assert 0 < chunk.length <= self.chunk_size
            assert chunk.start == sequence.num_computed
            assert chunk.samples == (chunk.start + chunk.length == sequence.num_tokens)
            assert len(sequence.block_ids) == -(-sequence.num_tokens // BLOCK_SIZE)
            assert sequence.key not in {one.sequence.key for one in self._following(sequence.key)}

    def _check_preemptions(self, before: dict[SequenceKey, int], running_before: list[SequenceKey]) -> None:
        preempted = [
            key
            for key, count in before.items()
            if self.scheduler.sequence(key) is None or self.streams[key].sequence.num_preemptions > count
        ]
        kept = [key for key in running_before if key not in preempted]
        for key in preempted:
            sequence = self.streams[key].sequence
            assert not sequence.block_ids
            assert sequence.num_computed == 0
            assert all(self.streams[other].sequence.arrival <= sequence.arrival for other in kept), "older preempted"

    def _settle(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        emissions = self.scheduler.settle(plan, result)
        for chunk in plan.chunks:
            self._note_prompt(chunk.sequence)
        for emission in emissions:
            self._hear(emission, result)
        return emissions

    def _hear(self, emission: Emission, result: StepResult | None = None) -> None:
        stream = self.streams[emission.key]
        assert emission.index == len(stream.shown)
        assert emission.chain == chain_of(stream.shown)
        assert emission.num_cached <= stream.sequence.num_prompt
        self._check_logprobs(stream, emission)
        stream.shown += emission.token_ids
        assert stream.shown == stream.expected[: len(stream.shown)]
        match emission.failure:
            case FailureCode.INVALID_LOGITS:
                assert result is not None
                assert emission.key in result.invalid
            case FailureCode.PREEMPTED:
                assert stream.sequence.num_preemptions == self.max_preemptions
            case None:
                is_complete = stream.shown == stream.expected
                assert emission.finish == (stream.reason if is_complete else None)
        if emission.is_last:
            self._stop_receiving(stream)
            del self.streams[emission.key]
            self._verify_cached(stream.sequence)
            assert self.scheduler.sequence(emission.key) is None
            assert not self.scheduler.cancel(emission.key)
        if emission.failure is not None:
            for other in self._choices(emission.key):
                self._drop(other)
                assert self.scheduler.sequence(other.sequence.key) is None

    def _check_logprobs(self, stream: Stream, emission: Emission) -> None:
        is_asked = stream.sequence.sampling.num_logprobs is not None
        assert emission.logprobs == (tuple(map(likelihood, emission.token_ids)) if is_asked else ())
        group = self.groups[emission.key.request]
        is_due = group.asks_prompt and bool(emission.token_ids)
        assert emission.prompt_logprobs == (tuple(map(likelihood, group.prompt[1:])) if is_due else ())
        group.asks_prompt &= not is_due

    def _note_prompt(self, computed: Sequence) -> None:
        """After a step that has computed something of that sequence."""
        group = self.groups[computed.key.request]
        is_over = computed.key in self.streams and self.scheduler.sequence(computed.key) is None
        if group.leader.sequence is computed and (is_over or computed.num_computed >= computed.num_prompt):
            group.has_prompt = True

    def _verify_cached(self, sequence: Sequence) -> None:
        self.content.verify_hits(self.prefix, sequence.token_ids, sequence.cache_salt)

    def _receive(self, stream: Stream, span: range) -> None:
        sequence = stream.sequence
        if not stream.receiving:
            stream.receiving = list(sequence.block_ids)
            self.pool.share(stream.receiving)
        if sequence.block_ids:
            self.content.write(sequence.token_ids, sequence.cache_salt, sequence.block_ids, span)

    def _stop_receiving(self, stream: Stream) -> None:
        self.pool.release(stream.receiving)
        stream.receiving = []

    def _commit(self, stream: Stream) -> None:
        sequence = stream.sequence
        token = next_token(sequence.token_ids, sequence.key.choice)
        sampling, prompt = sequence.sampling, sequence.token_ids[1 : sequence.num_prompt]
        first = FirstToken(
            token,
            logprobs=None if sampling.num_logprobs is None else likelihood(token),
            prompt_logprobs=tuple(map(likelihood, prompt)) if sequence.wants_prompt_logprobs else (),
        )
        emission = self.scheduler.conclude(sequence.key, first)
        needs_pages = len(stream.expected) - len(stream.shown) > 1 or bool(self._following(sequence.key))
        assert (emission is None) == needs_pages
        if emission is None:
            self._receive(stream, range(sequence.num_computed, sequence.num_tokens))
            self._stop_receiving(stream)
            emission = self.scheduler.activate(sequence.key, first)
        assert emission is not None
        stream.is_reserved = False
        stream.wants = Intake.LOCAL
        self.groups[sequence.key.request].has_prompt = True
        self._hear(emission)
        assert self.scheduler.activate(sequence.key, first) is None

    def _cancel(self, key: SequenceKey) -> None:
        stream = self.streams[key]
        self._drop(stream)
        assert self.scheduler.cancel(key)
        self._verify_cached(stream.sequence)
        assert not self.scheduler.cancel(key)
        group = self.groups[key.request]
        if group.leader is stream and not group.has_prompt and self._choices(key):
            group.leader = self._choices(key)[0]
            group.leader.wants = Intake.LOCAL if stream.is_reserved or stream.sequence.block_ids else stream.wants

    def _drop(self, stream: Stream) -> None:
        """Forget a stream; copies into its pages may go on."""
        del self.streams[stream.sequence.key]
        if stream.receiving:
            self.receivers.append((stream.sequence, stream.receiving))

    def _choices(self, key: SequenceKey) -> list[Stream]:
        """Return the choices of that request that are not over, by number."""
        return [stream for other, stream in sorted(self.streams.items()) if other.request == key.request]

    def _following(self, leader: SequenceKey) -> list[Stream]:
        """Return those that wait for the prompt of that leader."""
        group = self.groups[leader.request]
        if group.has_prompt or group.leader.sequence.key != leader:
            return []
        return [stream for stream in self._choices(leader) if stream is not group.leader]

    def _live(self) -> list[Sequence]:
        return [stream.sequence for stream in self.streams.values()]

    def _reserved(self) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.is_reserved]

    def _waiting(self) -> set[SequenceKey]:
        """Those without pages that are not reserved and follow nobody."""
        return {
            key
            for key, stream in self.streams.items()
            if not stream.sequence.block_ids and not stream.is_reserved and not self._is_following(stream)
        }

    def _is_following(self, stream: Stream) -> bool:
        group = self.groups[stream.sequence.key.request]
        return group.leader is not stream and not group.has_prompt


TestDecodeScheduler = DecodeMachine.TestCase
