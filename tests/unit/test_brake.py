"""Refusals that are repeated without asking anybody: for the like of what was refused, and not for long."""

import gc
import weakref

import pytest

from common.errors import Overloaded
from common.messages.ids import ModelName, TenantId
from gateway.brake import ASKING_S, LONGEST_S, MAX_FLOWS, Brake, Flow

FLOW = Flow(ModelName("m"), TenantId("a"), 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refusal(lasts_s: float) -> Overloaded:
    return Overloaded("So much waits.", retry_after_s=3.0, lasts_s=lasts_s)


def test_the_like_is_refused_with_less_time_to_wait(clock: Clock) -> None:
    brake = Brake(clock)
    brake.check(FLOW, 10.0)
    brake.note(FLOW, 10.0, refusal(9.0))
    clock.now_s += 0.25
    for limit_s in (10.0, 2.0):
        with pytest.raises(Overloaded, match="So much waits") as error:
            brake.check(FLOW, limit_s)
        assert error.value.retry_after_s == 2.75
        assert error.value.lasts_s == 0.0


@pytest.mark.parametrize(
    "other",
    [FLOW._replace(tenant=TenantId("b")), FLOW._replace(priority=1), FLOW._replace(model=ModelName("n"))],
)
def test_others_are_asked_for(clock: Clock, other: Flow) -> None:
    brake = Brake(clock)
    brake.note(FLOW, 10.0, refusal(9.0))
    brake.check(other, 10.0)


@pytest.mark.parametrize("limit_s", [11.0, None])
def test_whoever_has_more_time_is_asked_for(clock: Clock, limit_s: float | None) -> None:
    brake = Brake(clock)
    brake.note(FLOW, 10.0, refusal(9.0))
    brake.check(FLOW, limit_s)


def test_one_without_end_stands_for_all(clock: Clock) -> None:
    brake = Brake(clock)
    brake.note(FLOW, None, refusal(9.0))
    for limit_s in (None, 1.0):
        with pytest.raises(Overloaded):
            brake.check(FLOW, limit_s)


@pytest.mark.parametrize(("lasts_s", "ends_s"), [(0.1, 0.1), (60.0, LONGEST_S)])
def test_then_one_asks_and_the_others_a_moment_later(clock: Clock, lasts_s: float, ends_s: float) -> None:
    brake = Brake(clock)
    brake.note(FLOW, 10.0, refusal(lasts_s))
    clock.now_s += ends_s - 0.01
    with pytest.raises(Overloaded):
        brake.check(FLOW, 10.0)
    clock.now_s += 0.02
    brake.check(FLOW, 10.0)
    for _ in range(2):
        with pytest.raises(Overloaded):
            brake.check(FLOW, 10.0)
    clock.now_s += ASKING_S
    brake.check(FLOW, 10.0)
    brake.check(FLOW, 10.0)


def test_what_the_one_is_told_holds_for_the_others(clock: Clock) -> None:
    brake = Brake(clock)
    brake.note(FLOW, 10.0, refusal(0.1))
    clock.now_s += 0.15
    brake.check(FLOW, 10.0)
    brake.note(FLOW, 10.0, refusal(0.3))
    clock.now_s += 0.2
    with pytest.raises(Overloaded):
        brake.check(FLOW, 10.0)


def test_a_refusal_of_one_alone_is_not_repeated(clock: Clock) -> None:
    brake = Brake(clock)
    brake.note(FLOW, 10.0, refusal(0.0))
    brake.check(FLOW, 10.0)


def test_it_remembers_so_many_at_most(clock: Clock) -> None:
    brake = Brake(clock)
    for number in range(MAX_FLOWS + 1):
        brake.note(FLOW._replace(tenant=TenantId(str(number))), None, refusal(9.0))
    brake.check(FLOW._replace(tenant=TenantId("0")), None)
    with pytest.raises(Overloaded):
        brake.check(FLOW._replace(tenant=TenantId(str(MAX_FLOWS))), None)


def test_nothing_is_kept_of_who_was_refused(clock: Clock) -> None:
    class Request:
        """What the frames of a refused request hold."""

    def refuse(request: Request) -> None:
        raise refusal(9.0)

    brake, request = Brake(clock), Request()
    kept = weakref.ref(request)
    try:
        refuse(request)
    except Overloaded as error:
        brake.note(FLOW, 10.0, error)
    del request
    gc.collect()
    assert kept() is None
    with pytest.raises(Overloaded):
        brake.check(FLOW, 10.0)
