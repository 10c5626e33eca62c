"""What a decode worker knows about the price of a prefill elsewhere."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.messages.registry import Role, StepCost, WorkerHealth, WorkerLoad
from common.runtime.peers import Peers
from common.transfer.handshake import Transport
from common.transfer.puller import PullReport
from decode_worker.placing import Backlog, Decision, Place, Price, Reason
from decode_worker.quotes import DUE_S, FIRST_HANDOVER_S, LONGEST_HANDOVER_S, Quotes

TOKEN_BYTES = 1000
COST = StepCost(0.01, 0.001, 1e-6)
SENT = Decision(Place.THERE, Reason.COST, 100, here=Price(3.0), there=Price(1.0, delay_s=5.0), handover_s=0.2)


class Market:
    """Quotes of prefill workers with given loads; `now_s` is the time."""

    def __init__(self, *loads: WorkerLoad) -> None:
        self.loads = loads
        self.num_decode = 2
        self.now_s = 100.0
        self.quotes = Quotes(cast(Peers, self), TOKEN_BYTES, lambda: self.now_s)

    def open(self, role: Role) -> list[SimpleNamespace]:
        """Return the rows of a role."""
        loads = self.loads if role is Role.PREFILL else [load()] * self.num_decode
        return [SimpleNamespace(load=load) for load in loads]

    def handover_s(self) -> float:
        there = self.quotes.there()
        assert there is not None
        return there.handover_s


def load(cost: StepCost | None = COST, **fields: Any) -> WorkerLoad:
    return WorkerLoad(WorkerHealth.READY, step_cost=cost, **fields)


@pytest.mark.parametrize("loads", [(), (load(None),), (load(None), load(None))])
def test_without_a_measured_prefill_worker_there_is_no_price(loads: tuple[WorkerLoad, ...]) -> None:
    assert Market(*loads).quotes.there() is None


def test_workers_of_one_price_share_their_backlog() -> None:
    busy = load(num_running=2, num_waiting=1, num_uncomputed=700)
    there = Market(busy, load(StepCost(0.03, 0.003, 3e-6)), load(None, num_running=1, num_uncomputed=50)).quotes.there()
    assert there is not None
    assert (there.num_workers, there.backlog) == (3, Backlog(4, 750))
    assert there.cost.step_s(10, 1000) == pytest.approx(StepCost(0.02, 0.002, 2e-6).step_s(10, 1000))
    assert (there.token_bytes, there.link_bytes_per_s, there.handover_s) == (TOKEN_BYTES, None, FIRST_HANDOVER_S)


def test_an_only_decode_worker_knows_better_what_is_left_of_its_prompts() -> None:
    market = Market(load(num_running=2, num_uncomputed=700))
    market.num_decode = 1
    there = market.quotes.there()
    assert there is not None
    assert there.backlog == Backlog()


def test_the_link_is_as_fast_as_the_last_pulls_together() -> None:
    market = Market(load())
    for _ in range(100):
        market.quotes.pulled(PullReport(Transport.TCP, 1000, 1.0))
    for _ in range(100):
        market.quotes.pulled(PullReport(Transport.TCP, 9_000, 0.1))
        market.quotes.pulled(PullReport(Transport.TCP, 1_000, 0.1))
    there = market.quotes.there()
    assert there is not None
    assert there.link_bytes_per_s == pytest.approx(50_000, rel=0.15)


def test_what_was_not_expected_is_put_down_to_the_hand_over() -> None:
    market = Market(load())
    for _ in range(100):
        market.quotes.handed_over(SENT, 1.1)  # 0.8 s of computing were expected
    assert market.handover_s() == pytest.approx(0.3, rel=0.01)
    for _ in range(100):
        market.quotes.handed_over(SENT, 0.1)
    assert market.handover_s() == pytest.approx(0, abs=0.001)


def test_one_hand_over_that_met_a_catastrophe_is_no_price() -> None:
    market = Market(load())
    market.quotes.handed_over(SENT, 1000.0)
    assert market.handover_s() < LONGEST_HANDOVER_S / 4


def test_prompts_that_come_back_make_hand_overs_dear() -> None:
    market = Market(load())
    market.quotes.missed(Decision(Place.HERE, Reason.ABSENT, 100))
    assert market.handover_s() == FIRST_HANDOVER_S
    for _ in range(100):
        market.quotes.missed(Decision(Place.THERE, Reason.UNMEASURED, 100))
    assert market.handover_s() == pytest.approx(LONGEST_HANDOVER_S, rel=0.01)


def test_who_was_told_where_expected_nothing() -> None:
    market = Market(load())
    market.quotes.handed_over(Decision(Place.THERE, Reason.SETTING, 100), 5.0)
    assert market.handover_s() == FIRST_HANDOVER_S


def test_a_probe_is_due_when_nothing_was_sent_for_a_while() -> None:
    market = Market(load())

    def is_due() -> bool:
        there = market.quotes.there()
        assert there is not None
        return there.is_due

    assert is_due()
    market.quotes.sent(Decision(Place.HERE, Reason.SHORT, 3))
    assert is_due()
    market.quotes.sent(SENT)
    market.now_s += DUE_S
    assert not is_due()
    market.now_s += 0.1
    assert is_due()
