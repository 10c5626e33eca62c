"""In virtual time, on workers with cores of their own: no fixed choice serves mixed traffic better than a measured
one."""

import functools

import pytest

from common.messages.registry import StepCost
from tests.support.simulated_pair import BOUNDS, Machine, SimulatedPair, goodput, mixed

DURATION_S = 20.0
SEEDS = (1, 2)
SLOW, FAST = StepCost(0.04, 0.0015, 3e-7), StepCost(0.016, 0.0004, 2e-7)


@functools.cache
def served(cost: StepCost, mode: str, rate: float) -> float:
    """Return the goodput of a mode over all seeds."""
    total = 0.0
    for seed in SEEDS:
        answers = SimulatedPair(Machine(cost, cost), mode).run(mixed(rate, DURATION_S, seed))
        total += goodput(answers, DURATION_S)
    return total


@pytest.mark.parametrize(("cost", "rate"), [(SLOW, 0.5), (FAST, 1.0), (FAST, 3.0)])
def test_auto_is_as_good_as_the_better_of_always_and_never(cost: StepCost, rate: float) -> None:
    by_mode = {mode: served(cost, mode, rate) for mode in ("auto", "always", "never")}
    assert by_mode["auto"] >= 0.95 * max(by_mode["always"], by_mode["never"]), by_mode


def test_auto_uses_both_workers_where_one_is_not_enough() -> None:
    by_mode = {mode: served(FAST, mode, 3.0) for mode in ("auto", "always", "never")}
    assert by_mode["auto"] > 1.5 * max(by_mode["always"], by_mode["never"]), by_mode


def test_running_sequences_keep_their_target_beside_long_prompts() -> None:
    chats = [(0.1 * number, [number] * 100, 90) for number in range(4)]
    prompts = [(2.0, [1000 + number] * 3000, 4) for number in range(2)]
    answers = SimulatedPair(Machine(FAST, FAST), "never").run([*chats, *prompts])
    gaps = [
        later - earlier
        for answer in answers[:4]
        for earlier, later in zip(answer.times_s[5:], answer.times_s[6:], strict=False)
    ]
    assert max(gaps) < 1.25 * BOUNDS.itl_target_s
    assert all(len(answer.times_s) == wanted for answer, wanted in zip(answers, [90] * 4 + [4] * 2, strict=True))
