"""A decode scheduler and all of its clients, without a model: whatever it does is checked against what must be told.

`PagedContent` says what a step attends to; `Group` says who follows whom.
"""

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.messages.chain import chain_of
from common.messages.ids import BlockId, ChoiceIndex, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import Sequence, SequenceKey
from decode_worker.first_token import FirstToken
from decode_worker.scheduler import DecodeScheduler
from decode_worker.ticket import Intake
from tests.support.decode_requests import BLOCK_SIZE, CAPACITY, NUM_BLOCKS, Group, Request, Stream
from tests.support.likelihoods import likelihood
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, next_token, solo_output


class DecodeModel:
    """Clients (`streams`) and what they were told, over one pool."""

    def __init__(
        self, max_sequences: int, token_budget: int, chunk_size: int, max_preemptions: int, max_context: int
    ) -> None:
        self.max_sequences = max_sequences
        self.token_budget = token_budget
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

    def add(self, request: Request) -> None:
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

    def fall_back(self, stream: Stream, *, alone: bool) -> None:
        was_remote = stream.wants is Intake.REMOTE
        must_be_alone = stream.sequence.runs_alone or (alone and was_remote)
        self._stop_receiving(stream)
        assert self.scheduler.fall_back(stream.sequence.key, alone=alone) == was_remote
        assert {one.sequence.runs_alone for one in self.choices(stream.sequence.key)} == {must_be_alone}
        stream.is_reserved = False
        stream.wants = Intake.LOCAL

    def plan(self) -> StepPlan:
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

    def settle(self, plan: StepPlan, result: StepResult) -> list[Emission]:
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
            for other in self.choices(emission.key):
                self.drop(other)
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

    def receive(self, stream: Stream, span: range) -> None:
        sequence = stream.sequence
        if not stream.receiving:
            stream.receiving = list(sequence.block_ids)
            self.pool.share(stream.receiving)
        if sequence.block_ids:
            self.content.write(sequence.token_ids, sequence.cache_salt, sequence.block_ids, span)

    def _stop_receiving(self, stream: Stream) -> None:
        self.pool.release(stream.receiving)
        stream.receiving = []

    def commit(self, stream: Stream) -> None:
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
            self.receive(stream, range(sequence.num_computed, sequence.num_tokens))
            self._stop_receiving(stream)
            emission = self.scheduler.activate(sequence.key, first)
        assert emission is not None
        stream.is_reserved = False
        stream.wants = Intake.LOCAL
        self.groups[sequence.key.request].has_prompt = True
        self._hear(emission)
        assert self.scheduler.activate(sequence.key, first) is None

    def cancel(self, key: SequenceKey) -> None:
        stream = self.streams[key]
        self.drop(stream)
        assert self.scheduler.cancel(key)
        self._verify_cached(stream.sequence)
        assert not self.scheduler.cancel(key)
        group = self.groups[key.request]
        if group.leader is stream and not group.has_prompt and self.choices(key):
            group.leader = self.choices(key)[0]
            group.leader.wants = Intake.LOCAL if stream.is_reserved or stream.sequence.block_ids else stream.wants

    def drop(self, stream: Stream) -> None:
        """Forget a stream; copies into its pages may go on."""
        del self.streams[stream.sequence.key]
        if stream.receiving:
            self.receivers.append((stream.sequence, stream.receiving))

    def choices(self, key: SequenceKey) -> list[Stream]:
        """Return the choices of that request that are not over, by number."""
        return [stream for other, stream in sorted(self.streams.items()) if other.request == key.request]

    def _following(self, leader: SequenceKey) -> list[Stream]:
        """Return those that wait for the prompt of that leader."""
        group = self.groups[leader.request]
        if group.has_prompt or group.leader.sequence.key != leader:
            return []
        return [stream for stream in self.choices(leader) if stream is not group.leader]

    def live(self) -> list[Sequence]:
        return [stream.sequence for stream in self.streams.values()]

    def reserved(self) -> list[Stream]:
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

    def end_late_receiver(self, writes: bool) -> None:
        """A copy whose sequence is gone ends; its last write may come late, but only into pages it still owns."""
        sequence, blocks = self.receivers.pop(0)
        if writes:
            span = range(sequence.num_cached, sequence.num_tokens)
            self.content.write(sequence.token_ids, sequence.cache_salt, blocks, span)
        self.pool.release(blocks)

    def check(self) -> None:
        """Fail unless all accounts are right."""
        self.pool.check()
        scheduler = self.scheduler
        assert scheduler.num_running + scheduler.num_reserved <= self.max_sequences
        assert scheduler.num_running + scheduler.num_reserved + scheduler.num_waiting == len(self.streams)
        assert scheduler.num_reserved == len(self.reserved())
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
