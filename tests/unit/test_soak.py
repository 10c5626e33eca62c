"""What a soak calls wrong: errors that no fault excuses, broken connections, growth; and its schedule is its seed's."""

import itertools
from collections.abc import Callable

import pytest

from tests.soak.ledger import SETTLE_S, Disturbance, Ledger
from tests.soak.schedule import ENDS_A_LIFE, Kind, Schedule
from tests.soak.vitals import MIB, SHORTEST_LIFE_S, Life, Sample
from tests.support.fault_cluster import Shape

GATEWAY, OTHER = "gateway-0", "gateway-1"
BEGAN, OVER = 100.0, 110.0


def _ledger(kind: Kind, target: str, over: float | None = OVER) -> Ledger:
    ledger = Ledger(started=0.0)
    ledger.disturbances.append(Disturbance(kind, target, BEGAN, over, ends_life=kind in ENDS_A_LIFE))
    return ledger


@pytest.mark.parametrize(
    ("began", "ended", "is_excused"),
    [(90.0, 99.0, False), (90.0, 101.0, True), (OVER + SETTLE_S, 125.0, True), (OVER + SETTLE_S + 0.1, 125.0, False)],
)
def test_an_error_is_excused_by_a_fault_that_the_request_may_have_met(
    began: float, ended: float, is_excused: bool
) -> None:
    assert _ledger(Kind.FREEZE, "decode-0").may_fail(began, ended) is is_excused


def test_a_fault_that_is_not_over_excuses_whatever_comes_later() -> None:
    assert _ledger(Kind.FREEZE, "decode-0", over=None).may_fail(1000.0, 1001.0)


@pytest.mark.parametrize(
    ("kind", "gateway", "is_answered", "may_break"),
    [
        (Kind.KILL, GATEWAY, True, True),
        (Kind.KILL, OTHER, False, False),
        (Kind.FREEZE, GATEWAY, False, False),
        (Kind.TERMINATE, GATEWAY, False, True),
        (Kind.TERMINATE, GATEWAY, True, False),
    ],
)
def test_only_a_gateway_that_goes_breaks_connections(
    kind: Kind, gateway: str, is_answered: bool, may_break: bool
) -> None:
    assert _ledger(kind, GATEWAY).may_break(gateway, 101.0, 102.0, is_answered=is_answered) is may_break


@pytest.mark.parametrize(
    ("rss_mib", "num_files", "grown"),
    [
        (lambda part: 200.0, lambda part: 40, None),
        (lambda part: 100.0 + 200.0 * min(part, 0.2), lambda part: 40, None),  # warms up, then stays
        (lambda part: 200.0 + 50.0 * part, lambda part: 40, "RSS"),
        (lambda part: 200.0, lambda part: 40 + int(60 * part), "open files"),
    ],
)
def test_growth_is_what_goes_on_after_the_first_quarter(
    rss_mib: Callable[[float], float], num_files: Callable[[float], int], grown: str | None
) -> None:
    parts = [number / 100 for number in range(101)]
    samples = [Sample(part * SHORTEST_LIFE_S, int(rss_mib(part) * MIB), num_files(part)) for part in parts]
    life = Life("decode-0", 1, samples=samples)
    assert life.is_long
    growth = life.growth()
    assert growth is None if grown is None else growth is not None and growth.startswith(grown)


def test_a_seed_draws_the_same_faults_and_spares_its_elders() -> None:
    shape = Shape(num_gateways=2)
    first, again = (Schedule(7, shape) for _ in range(2))
    volleys = list(itertools.islice(first.volleys(), 300))
    assert volleys == list(itertools.islice(again.volleys(), 300))
    faults = [fault for volley in volleys for fault in volley]
    assert {fault.kind for fault in faults} == set(Kind)
    assert not [fault for fault in faults if fault.kind in ENDS_A_LIFE and fault.target in first.elders.values()]
    assert volleys != list(itertools.islice(Schedule(8, shape).volleys(), 300))
