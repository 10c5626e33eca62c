"""Prefill scheduler: whatever shares a step, every prompt ends with its own first token over its own complete pages.

A peer reads every block that is announced, at once and later. Kills these planted bugs (each was planted and found): a
block announced before it is full; the last block missing or announced too early; pages freed while held; a prompt that
attends to another's pages; a failed prompt that stays cached; younger ones that overtake; a starved prompt; a step over
its budget; an unfair share; blocks lost on any exit.

Kills the planted bugs cancelled-in-flight, evicted-but-known, freed-when-finished, head-overtaken-prefill,
hit-unpinned, published-too-far, published-when-reserved and scored-from-the-cache.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.messages.ids import BlockId, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.scheduling.emission import FailureCode
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.progress import Progress
from common.scheduling.sequence import Sequence, SequenceKey
from prefill_worker.scheduler import PrefillScheduler
from tests.support.likelihoods import likelihood
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, next_token

BLOCK_SIZE = 2
NUM_BLOCKS = 8
CAPACITY = BLOCK_SIZE * NUM_BLOCKS

TOKENS = st.sampled_from([0, 0, 0, 1])
PROMPTS = st.lists(TOKENS, min_size=1, max_size=5) | st.lists(TOKENS, min_size=6, max_size=CAPACITY + 1)


@dataclass
class Prompt:
    """A prompt and what its peer knows about it."""

    sequence: Sequence
    announced: list[tuple[BlockId, int]] = field(default_factory=list)
    """Block and generation."""
    token: int | None = None
    is_admitted: bool = False
    num_steps_without_share: int = 0


class PrefillMachine(RuleBasedStateMachine):
    @initialize(token_budget=st.sampled_from([1, 2, 3, 5, 8, 16]), chunk_size=st.integers(1, 10))
    def build(self, token_budget: int, chunk_size: int) -> None:
        self.token_budget = token_budget
        self.chunk_size = chunk_size
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "fingerprint")
        self.content = PagedContent(self.pool, BLOCK_SIZE)
        self.runner = ScriptedRunner(self.content)
        self.scheduler = PrefillScheduler(
            self.pool, self.prefix, block_size=BLOCK_SIZE, token_budget=token_budget, chunk_size=chunk_size
        )
        self.prompts: dict[SequenceKey, Prompt] = {}
        self.outdated: list[Prompt] = []
        """Released, but a peer still knows their references."""
        self.num_added = 0

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        salt=st.sampled_from(["", "", "a"]),
        num_top=st.sampled_from([None, None, 1]),
    )
    def add(self, prompts: list[list[int]], salt: str, num_top: int | None) -> None:
        sampling = SamplingParams(1, 5, num_logprobs=num_top, num_prompt_logprobs=num_top)
        for token_ids in prompts:
            self.num_added += 1
            key = SequenceKey(RequestId(str(self.num_added)), PlacementNumber(1))
            sequence = Sequence(key, list(token_ids), len(token_ids), sampling, self.num_added, salt)
            try:
                self.scheduler.add(sequence)
            except DoesNotFit:
                assert len(token_ids) > CAPACITY
            else:
                assert len(token_ids) <= CAPACITY
                self.prompts[key] = Prompt(sequence)

    @rule(count=st.sampled_from([1, 3, 8]))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            plan = self._plan()
            self._settle(plan, self.runner.run(plan, self._live()))

    @rule(data=st.data())
    def meet_nan(self, data: st.DataObject) -> None:
        """One prompt fails; its blocks are never hit again, the others go on."""
        plan = self._plan()
        if not plan:
            return
        victim = data.draw(st.sampled_from(plan.chunks)).sequence
        blocks = set(victim.block_ids)
        self._settle(plan, self.runner.run(plan, self._live(), frozenset({victim.key})))
        assert victim.key not in self.prompts
        found = self.prefix.match(victim.token_ids, victim.hash_chain, victim.num_tokens)
        assert not blocks & set(found)
        self.pool.release(found)

    @rule(data=st.data())
    def release_in_flight(self, data: st.DataObject) -> None:
        plan = self._plan()
        if not plan:
            return
        result = self.runner.run(plan, self._live())
        self._release(data.draw(st.sampled_from(plan.chunks)).sequence.key)
        self._settle(plan, result)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.prompts))))

    @rule()
    def pull_late(self) -> None:
        """A peer pulls by references of released prompts: each is stale, or names what it always named."""
        for prompt in self.outdated:
            for index, (block, generation) in enumerate(prompt.announced):
                if self.pool.generation(block) == generation:
                    self._read(prompt, index)

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        scheduler = self.scheduler
        assert scheduler.violations() == []
        assert scheduler.num_held == sum(prompt.token is not None for prompt in self.prompts.values())
        assert scheduler.num_running + scheduler.num_waiting + scheduler.num_held == len(self.prompts)
        owned = {block for prompt in self.prompts.values() for block in prompt.sequence.block_ids}
        assert self.pool.num_referenced == len(owned)
        for prompt in self.prompts.values():
            for index, (block, generation) in enumerate(prompt.announced):
                assert self.pool.generation(block) == generation
                self._read(prompt, index)

    def teardown(self) -> None:
        """Every prompt that is left gets its first token, and every block comes back."""
        if not hasattr(self, "pool"):
            return
        num_tokens = sum(prompt.sequence.num_tokens for prompt in self.prompts.values())
        for _ in range(num_tokens + 1):  # every step computes something
            for key in [key for key, prompt in self.prompts.items() if prompt.token is not None]:
                self._release(key)
            if not self.prompts:
                break
            plan = self._plan()
            assert plan, "nothing to run and yet not done"
            self._settle(plan, self.runner.run(plan, self._live()))
        assert not self.prompts, "does not end"
        assert self.pool.num_free == NUM_BLOCKS

    def _plan(self) -> StepPlan:
        waiting = [prompt for prompt in self.prompts.values() if not prompt.is_admitted]
        plan = self.scheduler.plan()
        for prompt in waiting:
            prompt.is_admitted = bool(prompt.sequence.block_ids)
        admissions = [prompt.is_admitted for prompt in sorted(waiting, key=lambda prompt: prompt.sequence.arrival)]
        assert admissions == sorted(admissions, reverse=True), "overtakes"
        self._check_shares(plan)
        return plan

    def _check_shares(self, plan: StepPlan) -> None:
        running = [prompt for prompt in self.prompts.values() if prompt.is_admitted and prompt.token is None]
        assert self.scheduler.num_running == len(running)
        assert bool(plan) == bool(running)
        assert plan.num_tokens <= self.token_budget
        shares = {chunk.sequence.key: chunk.length for chunk in plan.chunks}
        assert len(shares) == len(plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert 0 < chunk.length <= self.chunk_size
            assert chunk.start == sequence.num_computed
            assert chunk.samples == (chunk.start + chunk.length == sequence.num_tokens)
            assert len(sequence.block_ids) == -(-sequence.num_tokens // BLOCK_SIZE)
            if chunk.length < min(self.chunk_size, sequence.num_uncomputed):
                assert max(shares.values()) <= chunk.length + 1, "an unfair share"
        for prompt in running:
            prompt.num_steps_without_share += 1
            if prompt.sequence.key in shares:
                prompt.num_steps_without_share = 0
            num_served = max(1, self.token_budget // min(BLOCK_SIZE, self.chunk_size))
            assert prompt.num_steps_without_share <= (NUM_BLOCKS - 1) // num_served, "starves"

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        told = self.scheduler.settle(plan, result)
        still_here = [chunk.sequence.key for chunk in plan.chunks if chunk.sequence.key in self.prompts]
        assert [progress.key for progress in told] == still_here
        for progress in told:
            self._hear(progress, result)
        for chunk in plan.chunks:
            self._verify_cached(chunk.sequence)

    def _verify_cached(self, sequence: Sequence) -> None:
        self.content.verify_hits(self.prefix, sequence.token_ids, sequence.cache_salt)

    def _hear(self, progress: Progress, result: StepResult) -> None:
        prompt = self.prompts[progress.key]
        sequence = prompt.sequence
        if progress.failure is not None:
            assert progress.failure is FailureCode.INVALID_LOGITS
            assert progress.key in result.invalid
            self.outdated.append(self.prompts.pop(progress.key))
            assert not self.scheduler.release(progress.key)
            return
        num_full = sequence.num_computed // BLOCK_SIZE
        assert progress.num_ready_blocks == (num_full if progress.token is None else len(sequence.block_ids))
        assert progress.num_ready_blocks >= len(prompt.announced)
        assert progress.num_cached < sequence.num_tokens
        for block in sequence.block_ids[len(prompt.announced) : progress.num_ready_blocks]:
            prompt.announced.append((block, self.pool.generation(block)))
        if progress.token is not None:
            assert progress.token == next_token(sequence.token_ids)
            assert progress.num_ready_blocks * BLOCK_SIZE >= sequence.num_tokens
            prompt.token = progress.token
        self._check_logprobs(progress, sequence)

    def _check_logprobs(self, progress: Progress, sequence: Sequence) -> None:
        is_asked = sequence.sampling.num_logprobs is not None
        if progress.token is None or not is_asked:
            assert (progress.logprobs, progress.prompt_logprobs) == (None, ())
        else:
            assert progress.logprobs == likelihood(progress.token)
            assert progress.prompt_logprobs == tuple(map(likelihood, sequence.token_ids[1:]))
        if is_asked:
            assert progress.num_cached == 0

    def _release(self, key: SequenceKey) -> None:
        self.outdated.append(self.prompts.pop(key))
        assert self.scheduler.release(key)
        assert not self.scheduler.release(key)
        assert self.scheduler.sequence(key) is None

    def _read(self, prompt: Prompt, index: int) -> None:
        sequence = prompt.sequence
        span = range(index * BLOCK_SIZE, min((index + 1) * BLOCK_SIZE, sequence.num_tokens))
        blocks = [block for block, _ in prompt.announced]
        self.content.verify(sequence.token_ids, sequence.cache_salt, blocks, span)

    def _live(self) -> list[Sequence]:
        return [prompt.sequence for prompt in self.prompts.values()]


TestPrefillScheduler = PrefillMachine.TestCase
