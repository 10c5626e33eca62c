"""What steps cost is learnt from those that ran."""

import random
from types import SimpleNamespace
from typing import cast

import pytest

from common.messages.registry import StepCost
from common.scheduling.pace import MEMORY, NUM_WARM_UP, PaceMeter, TwinMeter
from common.scheduling.plan import Chunk, StepPlan
from tests.support.sequences import sequence

TRUE = StepCost(0.02, 0.001, 2e-6)


class Steps:
    """A meter and steps of given sizes; `cost` is what they take."""

    def __init__(self) -> None:
        self.meter = PaceMeter()
        self.cost = TRUE

    def run(self, num_tokens: int, num_pairs: int, noise: float = 1.0) -> None:
        plan = cast(StepPlan, SimpleNamespace(num_tokens=num_tokens, num_pairs=num_pairs))
        self.meter.note(plan, self.cost.step_s(num_tokens, num_pairs) * noise)

    def mixed(self, num_steps: int, draw: random.Random) -> None:
        """Decoding batches with contexts of all lengths, some with a part of a prompt."""
        for _ in range(num_steps):
            num_decoding = draw.randint(1, 32)
            num_prompt = draw.choice([0, 0, 0, draw.randint(16, 256)])
            num_pairs = num_decoding * draw.randint(50, 2000) + num_prompt * draw.randint(0, 2000)
            self.run(num_decoding + num_prompt, num_pairs, draw.uniform(0.9, 1.1))

    def expected_s(self, num_tokens: int, num_pairs: int) -> float:
        assert self.meter.cost is not None
        return self.meter.cost.step_s(num_tokens, num_pairs)


def test_nothing_is_known_before_the_first_steps_have_warmed_up() -> None:
    steps = Steps()
    for _ in range(NUM_WARM_UP):
        steps.run(100, 5000)
        assert steps.meter.cost is None
    steps.run(100, 5000)
    assert steps.meter.cost is not None


def test_an_empty_or_unmeasured_step_tells_nothing() -> None:
    meter = PaceMeter()
    for _ in range(NUM_WARM_UP + 1):
        meter.note(StepPlan(), 1.0)
        meter.note(StepPlan((Chunk(sequence("a", range(4)), 0, 4, samples=True),)), 0.0)
    assert meter.cost is None


def test_one_step_costs_what_its_tokens_do() -> None:
    steps = Steps()
    for _ in range(NUM_WARM_UP + 1):
        steps.run(100, 5000)
    assert steps.expected_s(200, 0) == pytest.approx(2 * TRUE.step_s(100, 5000), rel=0.01)


@pytest.mark.parametrize("size", [(1, 100), (32, 20_000), (64, 2000), (264, 40_000), (512, 500_000)])
def test_mixed_steps_tell_what_others_will_cost(size: tuple[int, int]) -> None:
    steps = Steps()
    steps.mixed(500, random.Random(3))
    assert steps.expected_s(*size) == pytest.approx(TRUE.step_s(*size), rel=0.15)


def test_no_part_of_a_cost_is_negative() -> None:
    draw = random.Random(5)
    steps = Steps()
    for _ in range(300):
        steps.run(draw.choice([1, 8, 100]), draw.randint(1, 10_000), draw.uniform(0.2, 5))
        cost = steps.meter.cost
        assert cost is None or min(cost.base_s, cost.token_s, cost.pair_s) >= 0


def test_a_host_that_becomes_busy_is_seen_soon() -> None:
    draw = random.Random(7)
    steps = Steps()
    steps.mixed(500, draw)
    steps.cost = StepCost(2 * TRUE.base_s, 2 * TRUE.token_s, 2 * TRUE.pair_s)
    steps.mixed(12 * MEMORY, draw)
    assert steps.expected_s(64, 5000) == pytest.approx(2 * TRUE.step_s(64, 5000), rel=0.25)


def test_a_time_without_prompts_does_not_forget_what_they_cost() -> None:
    draw = random.Random(9)
    steps = Steps()
    steps.mixed(200, draw)
    for _ in range(1000):
        steps.run(8, 8 * draw.randint(100, 300), draw.uniform(0.9, 1.1))
    assert steps.expected_s(256, 33_000) == pytest.approx(TRUE.step_s(256, 33_000), rel=0.25)


def test_one_interrupted_step_does_not_change_the_picture() -> None:
    draw = random.Random(11)
    steps = Steps()
    steps.mixed(300, draw)
    before_s = steps.expected_s(64, 5000)
    steps.run(64, 5000, noise=100)
    for _ in range(4):
        steps.run(64, 5000)
    assert steps.expected_s(64, 5000) < 1.5 * before_s


def test_steps_beside_others_are_measured_apart() -> None:
    meter = TwinMeter()
    plan = StepPlan((Chunk(sequence("a", range(40)), 0, 40, samples=True),))
    for _ in range(NUM_WARM_UP + 1):
        meter.note(plan, 0.1)
    assert meter.cost is not None
    assert meter.cost == meter.disturbed_cost, "nothing else is known"
    meter.is_disturbed = True
    for _ in range(NUM_WARM_UP + 1):
        meter.note(plan, 0.3)
    assert meter.cost.step_s(40, 0) == pytest.approx(0.3, rel=0.01)
    assert meter.disturbed_cost == meter.cost
    meter.is_disturbed = False
    assert meter.cost.step_s(40, 0) == pytest.approx(0.1, rel=0.01)


def test_pairs_are_counted_with_the_cached_context() -> None:
    one = sequence("a", range(20))
    plan = StepPlan((Chunk(one, 16, 1, samples=False), Chunk(sequence("b", range(9)), 4, 3, samples=False)))
    assert plan.num_pairs == 17 + (5 + 6 + 7)
