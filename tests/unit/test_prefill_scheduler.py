"""Prefill scheduler: fairness, order, and how long pages are held."""

import pytest

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.scheduling.emission import FailureCode
from common.scheduling.plan import StepPlan
from common.scheduling.progress import Progress
from common.scheduling.sequence import Sequence
from prefill_worker.scheduler import PrefillScheduler
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, next_token
from tests.support.sequences import key, sequence


class Worker:
    """A prefill scheduler with a pool and a runner without a model. `told` holds all progress in order."""

    def __init__(self, num_blocks: int = 64, *, token_budget: int = 32, chunk_size: int = 32) -> None:
        self.pool = BlockPool(num_blocks, [0] * num_blocks)
        self.runner = ScriptedRunner(PagedContent(self.pool, 16))
        self.scheduler = PrefillScheduler(
            self.pool,
            PrefixCache(self.pool, 16, "f"),
            block_size=16,
            token_budget=token_budget,
            chunk_size=chunk_size,
        )
        self.live: list[Sequence] = []
        self.told: list[Progress] = []

    def add(self, new: Sequence) -> Sequence:
        self.scheduler.add(new)
        self.live.append(new)
        return new

    def step(self, *nan: str) -> StepPlan:
        plan = self.scheduler.plan()
        result = self.runner.run(plan, self.live, frozenset(key(name) for name in nan))
        self.told += self.scheduler.settle(plan, result)
        return plan


def _lengths(plan: StepPlan) -> dict[str, int]:
    return {chunk.sequence.key.request: chunk.length for chunk in plan.chunks}


def test_a_prompt_becomes_ready_block_by_block_and_the_last_one_with_the_token() -> None:
    worker = Worker(token_budget=20)
    prompt = list(range(45))
    worker.add(sequence("a", prompt))
    for _ in range(3):
        worker.step()
    assert worker.told == [
        Progress(key("a"), 1),
        Progress(key("a"), 2),
        Progress(key("a"), 3, token=next_token(prompt)),
    ]
    assert not worker.step()


def test_cached_blocks_are_ready_at_once() -> None:
    worker = Worker()
    worker.add(sequence("a", range(64)))
    worker.step()
    worker.step()
    worker.add(sequence("b", [*range(40), *range(100, 200)], arrival=1))
    worker.step()
    assert worker.told[-1] == Progress(key("b"), 4, num_cached=32)


def test_pages_are_held_until_released() -> None:
    worker = Worker(num_blocks=4)
    worker.add(sequence("a", range(40)))
    waiting = worker.add(sequence("b", range(100, 140), arrival=1))
    for _ in range(3):
        worker.step()
    assert (worker.scheduler.num_held, worker.scheduler.num_waiting) == (1, 1)
    assert waiting.block_ids == []
    assert worker.scheduler.release(key("a"))
    assert not worker.scheduler.release(key("a"))
    worker.step()
    assert (worker.scheduler.num_held, worker.scheduler.num_running) == (0, 1)


def test_the_whole_prompt_is_reserved_before_anything_is_computed() -> None:
    worker = Worker()
    long = worker.add(sequence("a", range(100)))
    worker.step()
    assert len(long.block_ids) == 7


def test_what_never_fits_is_refused_and_blocks_nobody() -> None:
    worker = Worker(num_blocks=4)
    with pytest.raises(DoesNotFit):
        worker.add(sequence("large", range(65)))
    worker.add(sequence("full", range(64)))
    worker.step()
    worker.step()
    assert worker.told[-1].token is not None


def test_a_large_prompt_at_the_head_is_not_overtaken() -> None:
    worker = Worker(num_blocks=4)
    worker.add(sequence("running", range(17)))
    worker.step()
    worker.add(sequence("large", range(100, 140), arrival=1))
    worker.add(sequence("small", [1], arrival=2))
    assert not worker.step()
    worker.scheduler.release(key("running"))
    assert list(_lengths(worker.step())) == ["small", "large"]


def test_a_short_prompt_behind_a_long_one_starts_with_the_next_step() -> None:
    worker = Worker(token_budget=32)
    worker.add(sequence("long", range(500)))
    worker.step()
    worker.add(sequence("short", range(600, 610), arrival=1))
    assert _lengths(worker.step()) == {"short": 10, "long": 22}
    assert worker.told[-2].token is not None or worker.told[-1].token is not None


def test_what_one_prompt_does_not_use_goes_to_the_others() -> None:
    worker = Worker(token_budget=60, chunk_size=40)
    for place, (name, num_tokens) in enumerate((("large", 200), ("small", 4), ("middle", 18))):
        worker.add(sequence(name, range(1000 * place, 1000 * place + num_tokens), arrival=place))
    assert _lengths(worker.step()) == {"small": 4, "middle": 18, "large": 38}


def test_more_prompts_than_useful_shares_take_turns() -> None:
    worker = Worker(token_budget=32)
    for place in range(6):
        worker.add(sequence(str(place), range(1000 * place, 1000 * place + 90), arrival=place))
    turns = [sorted(_lengths(worker.step())) for _ in range(4)]
    assert turns == [["0", "1"], ["2", "3"], ["4", "5"], ["0", "1"]]


def test_nan_fails_one_prompt_and_its_blocks_leave_the_cache() -> None:
    worker = Worker()
    worker.add(sequence("a", range(32)))
    worker.add(sequence("b", range(100, 132), arrival=1))
    worker.step()
    worker.step("a")
    assert worker.told[-2:] == [
        Progress(key("a"), 0, failure=FailureCode.INVALID_LOGITS),
        Progress(key("b"), 2, token=next_token(list(range(100, 132)))),
    ]
    assert not worker.scheduler.release(key("a"))
    assert (worker.pool.num_referenced, worker.pool.num_cached) == (2, 0)
    again = worker.add(sequence("again", range(32), arrival=2))
    worker.step()
    assert again.num_cached == 0


@pytest.mark.parametrize("num_steps", [0, 1, 9])
def test_releasing_cancels_in_any_state(num_steps: int) -> None:
    worker = Worker()
    worker.add(sequence("a", range(40)))
    for _ in range(num_steps):
        worker.step()
    assert worker.scheduler.release(key("a"))
    assert worker.scheduler.sequence(key("a")) is None
    assert not worker.step()
    assert worker.pool.num_free == worker.pool.num_total


def test_the_chunks_that_a_release_spares_are_counted() -> None:
    worker = Worker(num_blocks=8, token_budget=32, chunk_size=16)
    for name, length in (("running", 50), ("done", 16), ("waiting", 70)):
        worker.add(
            sequence(name, range(100 * len(worker.live), 100 * len(worker.live) + length), arrival=len(worker.live))
        )
    worker.step()
    assert worker.scheduler.num_waiting == 1
    for name, total in (("running", 3), ("done", 3), ("waiting", 8), ("waiting", 8), ("unheard of", 8)):
        worker.scheduler.release(key(name))
        assert worker.scheduler.num_cancelled_chunks == total


def test_a_prompt_that_fails_spares_nothing() -> None:
    worker = Worker(chunk_size=16)
    worker.add(sequence("a", range(40)))
    worker.step("a")
    worker.scheduler.release(key("a"))
    assert worker.scheduler.num_cancelled_chunks == 0
    assert worker.scheduler.violations() == []


def test_a_prompt_that_is_in_no_queue_is_a_violation() -> None:
    worker = Worker()
    worker.add(sequence("a", range(40)))
    worker.step()
    assert worker.scheduler.violations() == []
    worker.scheduler._held.clear()
    worker.scheduler._running.clear()
    assert worker.scheduler.violations() == ["1 prompts stand 0 times in the queues"]
