"""Logprobs of a prompt: nothing of it comes from a cache, and what is computed twice is told once."""

from collections.abc import Sequence as Tokens

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.logprobs import TokenLogprobs
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.emission import FailureCode
from common.scheduling.plan import StepResult
from common.scheduling.progress import Progress
from common.scheduling.sequence import Sequence
from prefill_worker.scheduler import PrefillScheduler
from tests.support.likelihoods import likelihood
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, next_token
from tests.support.sequences import key, sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def scored(name: str, prompt: Tokens[int], *, num_shown: int = 0, arrival: int = 0) -> Sequence:
    return sequence(name, prompt, num_shown=num_shown, arrival=arrival, num_logprobs=1, num_prompt_logprobs=1)


class Worker:
    """A prefill scheduler over a runner without a model."""

    def __init__(self, chunk_size: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "f")
        self.runner = ScriptedRunner(PagedContent(self.pool, BLOCK_SIZE))
        self.scheduler = PrefillScheduler(
            self.pool, self.prefix, block_size=BLOCK_SIZE, token_budget=64, chunk_size=chunk_size
        )

    def prefill(self, new: Sequence) -> Progress:
        """Return what is told at the end."""
        self.scheduler.add(new)
        while True:
            plan = self.scheduler.plan()
            (progress,) = self.scheduler.settle(plan, self.runner.run(plan, [new]))
            if progress.token is not None:
                assert self.scheduler.release(new.key)
                return progress
            assert progress.prompt_logprobs == ()


def expected(prompt: Tokens[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(map(likelihood, prompt[1:]))


def test_they_come_with_the_first_token_however_the_prompt_is_cut() -> None:
    for chunk_size in (1, 3, len(PROMPT) - 1, len(PROMPT), 64):
        progress = Worker(chunk_size).prefill(scored("a", PROMPT))
        assert progress.prompt_logprobs == expected(PROMPT)
        assert progress.logprobs == likelihood(next_token(PROMPT))


def test_a_prompt_of_one_token_has_none() -> None:
    progress = Worker(8).prefill(scored("a", [7]))
    assert (progress.prompt_logprobs, progress.token) == ((), next_token([7]))


def test_who_does_not_ask_gets_none() -> None:
    progress = Worker(3).prefill(sequence("a", PROMPT))
    assert (progress.prompt_logprobs, progress.logprobs) == ((), None)


def test_a_cached_prompt_is_computed_again_and_serves_others() -> None:
    worker = Worker(4)
    assert worker.prefill(scored("a", PROMPT)).num_cached == 0
    assert worker.prefill(sequence("b", PROMPT)).num_cached == 8
    again = worker.prefill(scored("c", PROMPT))
    assert (again.num_cached, again.prompt_logprobs) == (0, expected(PROMPT))
    worker.pool.check()


def test_who_continues_an_answer_does_not_ask_again() -> None:
    worker = Worker(4)
    worker.prefill(sequence("a", PROMPT))
    progress = worker.prefill(scored("b", [*PROMPT, 2], num_shown=1))
    assert (progress.num_cached, progress.prompt_logprobs) == (8, ())
    assert progress.logprobs == likelihood(next_token([*PROMPT, 2]))


class Preempted:
    """A scored prompt of ten tokens, of which `num_computed` were computed before its blocks were taken away."""

    def __init__(self, num_computed: int) -> None:
        self.pool = pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.blocks = SequenceBlocks(pool, PrefixCache(pool, BLOCK_SIZE, "f"), BLOCK_SIZE)
        self.sequence = scored("a", PROMPT)
        assert self.blocks.acquire(self.sequence)
        self.sequence.prompt_logprobs += expected(PROMPT)[:num_computed]
        self.blocks.advance(self.sequence, num_computed)
        self.blocks.release(self.sequence)


def test_a_prompt_that_was_half_scored_begins_again() -> None:
    half = Preempted(8)
    assert half.sequence.prompt_logprobs == []
    assert half.blocks.acquire(half.sequence)
    assert half.sequence.num_computed == 0  # in spite of two cached blocks


def test_a_prompt_that_begins_again_serves_others() -> None:
    half = Preempted(8)
    others = half.pool.take(NUM_BLOCKS)
    assert others is not None  # nothing of it is cached any more
    half.pool.release(others)
    assert half.blocks.acquire(half.sequence)
    half.blocks.advance(half.sequence, len(PROMPT))
    other = sequence("b", PROMPT)
    assert half.blocks.acquire(other)
    assert other.num_cached == 8


def test_a_complete_score_is_kept_and_the_rest_may_come_from_the_cache() -> None:
    complete = Preempted(9)
    assert complete.sequence.prompt_logprobs == list(expected(PROMPT))
    assert complete.blocks.acquire(complete.sequence)
    assert complete.sequence.num_computed == 8


class TestFailures:
    """Of two prompts side by side one fails, half-way through its score."""

    def run(self, **failures: frozenset[object]) -> tuple[Worker, list[Progress]]:
        worker = Worker(8)
        bad, good = scored("bad", PROMPT), scored("good", PROMPT[::-1], arrival=1)
        worker.scheduler.add(bad)
        worker.scheduler.add(good)
        told: list[Progress] = []
        for _ in range(2):
            plan = worker.scheduler.plan()
            result = worker.runner.run(plan, [bad, good])
            is_last = bool(result.tokens)
            tokens = {each: token for each, token in result.tokens.items() if each != bad.key}
            if is_last:
                result = StepResult(tokens, prompt_logprobs=result.prompt_logprobs, **failures)  # type: ignore[arg-type]
            told = worker.scheduler.settle(plan, result)
        return worker, told

    def test_by_its_logits(self) -> None:
        worker, told = self.run(invalid=frozenset({key("bad")}))
        failed, done = told
        assert failed == Progress(key("bad"), 0, failure=FailureCode.INVALID_LOGITS)
        assert done.prompt_logprobs == expected(PROMPT[::-1])
        assert worker.prefill(sequence("again", PROMPT)).num_cached == 0  # what it computed is suspect

    def test_by_its_grammar(self) -> None:
        worker, told = self.run(violated=frozenset({key("bad")}))
        failed, done = told
        assert failed == Progress(key("bad"), 0, failure=FailureCode.GRAMMAR_VIOLATED)
        assert done.prompt_logprobs == expected(PROMPT[::-1])
        assert worker.prefill(sequence("again", PROMPT)).num_cached == 8  # its pages are good
