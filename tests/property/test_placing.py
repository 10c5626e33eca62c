"""Where a prompt is computed: the prices of both places move the right way with everything that they depend on.

Kills the planted bugs delay-of-others-free, prefill-queue-ignored and target-forgotten.
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.registry import StepCost
from decode_worker.placing import (
    MIN_CHUNK,
    Backlog,
    Bounds,
    Here,
    Place,
    Placing,
    Price,
    Reason,
    There,
    delay_there,
    price_here,
    prompt_allowance,
    seconds_there,
)

COUNTS = st.integers(0, 10_000)
PROMPTS = st.integers(1, 8192)
COSTS = st.builds(
    StepCost,
    base_s=st.floats(1e-4, 0.2),
    token_s=st.floats(1e-6, 0.01),
    pair_s=st.floats(0, 1e-5),
)
BACKLOGS = st.builds(Backlog, st.integers(0, 64), COUNTS)
BOUNDS = st.builds(
    lambda chunk, more, target_s: Bounds(chunk, chunk + more, target_s),
    st.integers(1, 512),
    st.integers(0, 512),
    st.floats(0.001, 1.0),
)
HERE = st.builds(Here, COSTS, st.integers(0, 64), COUNTS, BACKLOGS, st.none() | COSTS)
THERE = st.builds(
    There,
    COSTS,
    st.integers(1, 4),
    BACKLOGS,
    st.integers(0, 10**6),
    st.none() | st.floats(1e6, 1e11),
    st.floats(0, 1.0),
)
AT_MOST = 1 + 1e-9
"""Rounding."""


def _raised(value: Any, path: str, amount: float) -> Any:
    """Return `value` with the field at the dotted path raised."""
    name, _, rest = path.partition(".")
    old = getattr(value, name)
    new = _raised(old, rest, amount) if rest else old + amount
    if isinstance(value, StepCost):
        fields = {field: getattr(value, field) for field in value.__struct_fields__}
        return StepCost(**fields | {name: new})
    return dataclasses.replace(value, **{name: new})


def _here_s(num_tokens: int, here: Here, bounds: Bounds) -> float:
    return price_here(num_tokens, here, bounds).total_s


@given(PROMPTS, COUNTS, HERE, THERE, BOUNDS)
def test_more_tokens_cost_no_less(num: int, more: int, here: Here, there: There, bounds: Bounds) -> None:
    assert _here_s(num, here, bounds) <= _here_s(num + more, here, bounds) * AT_MOST
    assert seconds_there(num, there, bounds) <= seconds_there(num + more, there, bounds) * AT_MOST


@pytest.mark.parametrize("path", ["num_pairs", "backlog.num_prompts", "backlog.num_tokens", "num_decoding"])
@given(num=PROMPTS, more=COUNTS, here=HERE, bounds=BOUNDS)
def test_more_work_here_costs_no_less_here(path: str, num: int, more: int, here: Here, bounds: Bounds) -> None:
    assert _here_s(num, here, bounds) <= _here_s(num, _raised(here, path, more), bounds) * AT_MOST


@pytest.mark.parametrize("path", ["cost.base_s", "cost.token_s", "cost.pair_s"])
@given(num=PROMPTS, slower_s=st.floats(0, 0.1), here=HERE, there=THERE, bounds=BOUNDS)
def test_slower_steps_cost_no_less(
    path: str, num: int, slower_s: float, here: Here, there: There, bounds: Bounds
) -> None:
    assert _here_s(num, here, bounds) <= _here_s(num, _raised(here, path, slower_s), bounds) * AT_MOST
    assert seconds_there(num, there, bounds) <= seconds_there(num, _raised(there, path, slower_s), bounds) * AT_MOST


@pytest.mark.parametrize("path", ["backlog.num_prompts", "backlog.num_tokens", "token_bytes", "handover_s"])
@given(num=PROMPTS, more=COUNTS, there=THERE, bounds=BOUNDS)
def test_more_in_the_way_costs_no_less_there(path: str, num: int, more: int, there: There, bounds: Bounds) -> None:
    assert seconds_there(num, there, bounds) <= seconds_there(num, _raised(there, path, more), bounds) * AT_MOST


@given(PROMPTS, st.floats(1e6, 1e11), st.floats(0, 1e11), THERE, BOUNDS)
def test_a_faster_link_costs_no_more(num: int, speed: float, more: float, there: There, bounds: Bounds) -> None:
    slow = dataclasses.replace(there, link_bytes_per_s=speed)
    fast = dataclasses.replace(there, link_bytes_per_s=speed + more)
    assert seconds_there(num, fast, bounds) <= seconds_there(num, slow, bounds) * AT_MOST


@given(PROMPTS, st.floats(0, 1.0), HERE, BOUNDS)
def test_a_later_target_costs_no_more_here(num: int, later_s: float, here: Here, bounds: Bounds) -> None:
    patient = _raised(bounds, "itl_target_s", later_s)
    assert _here_s(num, here, patient) <= _here_s(num, here, bounds) * AT_MOST


@given(PROMPTS, COUNTS, HERE, THERE, BOUNDS)
def test_a_longer_queue_there_sends_nobody_there(num: int, more: int, here: Here, there: There, bounds: Bounds) -> None:
    placing = Placing(bounds, 16)
    crowded = _raised(there, "backlog.num_tokens", more)
    before = placing.decide(num, here, there, may_go=True)
    after = placing.decide(num, here, crowded, may_go=True)
    assert (before.place, after.place) != (Place.HERE, Place.THERE)


@given(PROMPTS, HERE, THERE, BOUNDS)
def test_the_cheaper_place_is_chosen_and_its_price_told(num: int, here: Here, there: There, bounds: Bounds) -> None:
    decision = Placing(bounds, 0).decide(num, here, there, may_go=True)
    there_s = seconds_there(num, there, bounds)
    assert decision.here == price_here(num, here, bounds)
    assert decision.there == Price(there_s, delay_there(there_s, here, bounds))
    assert decision.place is (Place.THERE if decision.there.total_s < decision.here.total_s else Place.HERE)
    chosen = decision.there if decision.place is Place.THERE else decision.here
    assert decision.expected_s == chosen.first_token_s
    assert decision.reason is Reason.COST


@given(COSTS, st.integers(1, 64), COUNTS, COUNTS, BOUNDS)
def test_a_step_with_a_prompt_meets_the_target_where_it_can(
    cost: StepCost, num_decoding: int, num_pairs: int, num_context: int, bounds: Bounds
) -> None:
    allowance = prompt_allowance(cost, num_decoding, num_pairs, num_context, bounds)

    def step_s(num_tokens: int) -> float:
        return cost.step_s(num_decoding + num_tokens, num_pairs + num_tokens * num_context)

    assert min(MIN_CHUNK, bounds.token_budget) <= allowance <= bounds.token_budget
    if allowance > MIN_CHUNK:
        assert step_s(allowance) <= bounds.itl_target_s * AT_MOST
    if allowance < bounds.token_budget:
        assert step_s(allowance + 1) > bounds.itl_target_s / AT_MOST


@given(COSTS, BOUNDS)
def test_nobody_is_disturbed_where_nobody_decodes(cost: StepCost, bounds: Bounds) -> None:
    assert prompt_allowance(cost, 0, 0, 0, bounds) == bounds.token_budget
    assert price_here(5000, Here(cost), bounds).delay_s == 0.0
    assert delay_there(10.0, Here(cost, disturbed=StepCost(10.0, 0.0, 0.0)), bounds) == 0.0


BOUNDS_100 = Bounds(256, 512, 0.1)
FAST, SLOW = StepCost(0.01, 0.0001, 0.0), StepCost(0.04, 0.0015, 0.0)


@pytest.mark.parametrize(
    ("num_tokens", "may_go", "runs_alone", "there", "place", "reason"),
    [
        (500, True, True, There(FAST), Place.HERE, Reason.ALONE),
        (500, False, False, There(FAST), Place.HERE, Reason.ABSENT),
        (16, True, False, There(FAST), Place.HERE, Reason.SHORT),
        (17, True, False, None, Place.THERE, Reason.UNMEASURED),
        (500, True, False, There(FAST), Place.THERE, Reason.COST),
        (500, True, False, There(SLOW, handover_s=1.0), Place.HERE, Reason.COST),
        (100, True, False, There(SLOW, handover_s=1.0, is_due=True), Place.THERE, Reason.PROBE),
        (500, True, False, There(SLOW, handover_s=1.0, is_due=True), Place.HERE, Reason.COST),
    ],
)
def test_what_is_decided_and_why(
    num_tokens: int, *, may_go: bool, runs_alone: bool, there: There | None, place: Place, reason: Reason
) -> None:
    placing = Placing(BOUNDS_100, 16)
    decision = placing.decide(num_tokens, Here(SLOW, 4, 100), there, may_go=may_go, runs_alone=runs_alone)
    assert (decision.place, decision.reason, decision.num_tokens) == (place, reason, num_tokens)


@pytest.mark.parametrize(
    ("local_max", "may_go", "place"),
    [(0, True, Place.THERE), (16, False, Place.HERE)],
    ids=["always", "never"],
)
def test_who_is_told_where_measures_nothing(local_max: int, *, may_go: bool, place: Place) -> None:
    placing = Placing(BOUNDS_100, local_max, is_measured=False)
    decision = placing.decide(1, Here(FAST), There(FAST), may_go=may_go)
    assert (decision.place, decision.reason) == (place, Reason.SETTING)
    assert (decision.here, decision.there, decision.expected_s) == (None, None, None)


def test_an_idle_worker_keeps_a_prompt_that_would_gain_nothing_elsewhere() -> None:
    decision = Placing(BOUNDS_100, 16).decide(300, None, There(FAST, handover_s=0.005), may_go=True)
    assert decision.place is Place.HERE


def test_a_prompt_that_would_delay_a_full_batch_goes_elsewhere() -> None:
    placing, there = Placing(BOUNDS_100, 16), There(SLOW, handover_s=0.005)
    assert placing.decide(300, Here(SLOW), there, may_go=True).place is Place.HERE
    crowded = placing.decide(300, Here(SLOW, 40, 4000), there, may_go=True)
    assert crowded.place is Place.THERE
    assert crowded.here is not None
    assert crowded.here.delay_s > 0


@pytest.mark.parametrize(("num_cached", "place"), [(0, Place.THERE), (100, Place.THERE), (101, Place.HERE)])
def test_a_conversation_stays_before_anything_is_measured(num_cached: int, place: Place) -> None:
    decision = Placing(BOUNDS_100, 16).decide(100, None, None, may_go=True, num_cached=num_cached)
    assert decision.place is place
    assert decision.reason is (Reason.CACHED if place is Place.HERE else Reason.UNMEASURED)


def test_a_conversation_costs_more_elsewhere() -> None:
    placing, here, there = Placing(BOUNDS_100, 16), Here(SLOW, 4, 400), There(SLOW, is_due=True)
    assert placing.decide(200, here, there, may_go=True).place is Place.THERE
    assert placing.decide(200, here, there, may_go=True, num_cached=1000).place is Place.HERE


@given(PROMPTS, COUNTS, COUNTS, THERE, BOUNDS)
def test_more_that_is_cached_here_costs_no_less_there(
    num: int, num_cached: int, more: int, there: There, bounds: Bounds
) -> None:
    less_s = seconds_there(num, there, bounds, num_cached)
    assert less_s <= seconds_there(num, there, bounds, num_cached + more) * AT_MOST


def test_a_prefill_worker_that_takes_our_cores_is_not_free() -> None:
    placing, there = Placing(BOUNDS_100, 16), There(SLOW, handover_s=0.005)
    alone = placing.decide(300, Here(SLOW, 30, 3000), there, may_go=True)
    beside = placing.decide(300, Here(SLOW, 30, 3000, disturbed=StepCost(0.4, 0.015, 0.0)), there, may_go=True)
    assert (alone.place, beside.place) == (Place.THERE, Place.HERE)
    assert beside.there is not None
    assert beside.there.delay_s > 0


@given(st.floats(0, 100), st.floats(0, 100), HERE, BOUNDS)
def test_a_longer_prefill_elsewhere_delays_no_less(compute_s: float, more_s: float, here: Here, bounds: Bounds) -> None:
    assert delay_there(compute_s, here, bounds) <= delay_there(compute_s + more_s, here, bounds) * AT_MOST


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    there = There(SLOW, backlog=Backlog(1, 4000))
    alone_s = seconds_there(100, There(SLOW), BOUNDS_100)
    assert seconds_there(100, there, BOUNDS_100) == pytest.approx(alone_s + 100 * SLOW.token_s)
