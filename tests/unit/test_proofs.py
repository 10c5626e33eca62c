"""What a gateway makes of what its decode workers have proved: trust, readiness, and the reason for its absence."""

import pytest

from common.messages.ids import Epoch, WorkerId
from gateway.proofs import BUSY_S, Proofs
from gateway.streams import Source

FIRST = Source(WorkerId("decode-0"), Epoch(1))
SECOND = Source(WorkerId("decode-1"), Epoch(2))
WINDOW_S = 20.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def proofs(clock: Clock) -> Proofs:
    return Proofs(WINDOW_S, clock)


def test_an_untried_worker_is_trusted_and_proves_nothing(clock: Clock, proofs: Proofs) -> None:
    assert proofs.is_trusted(FIRST)
    assert proofs.age_s(FIRST) is None
    clock.now_s += 3
    readiness = proofs.readiness([FIRST, SECOND])
    assert (readiness.is_ready, readiness.reason) == (
        False,
        "no canary has come back for 3 s: decode-0, decode-1",
    )


def test_one_proof_makes_ready_for_the_window(clock: Clock, proofs: Proofs) -> None:
    proofs.note(SECOND)
    clock.now_s += WINDOW_S
    assert proofs.readiness([FIRST, SECOND]).is_ready
    assert proofs.age_s(SECOND) == WINDOW_S
    clock.now_s += 1
    readiness = proofs.readiness([FIRST, SECOND])
    assert (readiness.is_ready, readiness.reason) == (False, "no canary has come back for 21 s: decode-0, decode-1")


def test_a_proof_of_a_worker_that_takes_no_work_does_not_count(proofs: Proofs) -> None:
    proofs.note(SECOND)
    assert not proofs.readiness([FIRST]).is_ready


def test_a_doubted_worker_leaves_until_something_comes_back(proofs: Proofs, caplog: pytest.LogCaptureFixture) -> None:
    proofs.note(FIRST)
    proofs.miss(FIRST, "nothing came back")
    proofs.miss(FIRST, "still nothing")
    assert not proofs.is_trusted(FIRST)
    assert proofs.is_trusted(SECOND)
    assert proofs.readiness([FIRST]).reason == "no canary has come back for 0 s: decode-0 (still nothing)"
    proofs.note(FIRST)
    assert proofs.is_trusted(FIRST)
    assert proofs.readiness([FIRST]).is_ready
    assert [record.getMessage() for record in caplog.records] == [
        "decode-0 is not trusted any more: nothing came back",
        "decode-0 is trusted again",
    ]


def test_b112_a_busy_worker_stays_ready_for_a_while(clock: Clock, proofs: Proofs) -> None:
    proofs.note(FIRST)
    clock.now_s += WINDOW_S
    proofs.excuse(FIRST)
    for _ in range(int(BUSY_S / WINDOW_S)):
        clock.now_s += WINDOW_S
        assert proofs.readiness([FIRST]).is_ready
        proofs.excuse(FIRST)
    clock.now_s += 1
    proofs.excuse(FIRST)
    assert not proofs.is_trusted(FIRST)
    assert not proofs.readiness([FIRST]).is_ready


def test_a_silent_worker_that_moves_after_all_was_busy(proofs: Proofs) -> None:
    proofs.miss(FIRST, "nothing came back")
    proofs.excuse(FIRST)
    assert proofs.is_trusted(FIRST)
    assert proofs.readiness([FIRST]).is_ready


def test_a_failure_is_ended_by_nothing_but_a_proof(proofs: Proofs) -> None:
    proofs.fail(FIRST, "NaN")
    proofs.miss(FIRST, "nothing came back")
    proofs.excuse(FIRST)
    assert not proofs.is_trusted(FIRST)
    assert not proofs.readiness([FIRST]).is_ready
    proofs.note(FIRST)
    assert proofs.is_trusted(FIRST)


def test_what_left_must_prove_itself_again_and_stays_doubted(proofs: Proofs) -> None:
    proofs.note(FIRST)
    proofs.miss(SECOND, "nothing came back")
    for source in (FIRST, SECOND):
        proofs.lapse(source)
    assert not proofs.readiness([FIRST, SECOND]).is_ready
    assert (proofs.is_trusted(FIRST), proofs.is_trusted(SECOND)) == (True, False)


def test_an_incarnation_that_is_gone_is_forgotten(proofs: Proofs) -> None:
    proofs.miss(FIRST, "nothing came back")
    proofs.note(SECOND)
    proofs.retain([SECOND])
    assert proofs.is_trusted(FIRST)
    assert proofs.readiness([SECOND]).is_ready
