"""The bindings of a prefill worker: held while their leases are renewed, and ended once, whatever the way out."""

import asyncio
import dataclasses
from dataclasses import dataclass, field

import msgspec
import pytest

from common.messages.ids import ChoiceIndex, EntryId, TryNumber
from common.scheduling.sequence import SequenceKey
from prefill_worker.core import Command, Release
from prefill_worker.holdings import BindingKey, Holding, Holdings, Outcome, key_for, key_of
from proto import worker_pb2 as pb
from tests.support.broker_records import make_task, worker_record


@dataclass
class Told:
    """What holdings have said."""

    commands: list[Command] = field(default_factory=list)
    ended: list[Holding] = field(default_factory=list)
    now_s: float = 1000.0

    def holdings(self) -> Holdings:
        return Holdings(self.commands.append, self.ended.append, lambda: self.now_s)


@pytest.fixture
def told() -> Told:
    return Told()


def make_holding(request: str = "r", *, lease_s: float = 60.0) -> Holding:
    return Holding(
        task=make_task(request),
        entry=EntryId("1-0"),
        author=worker_record(),
        wanted=range(1),
        shown=(),
        lease_s=lease_s,
    )


def hold(holdings: Holdings, request: str = "r", *, lease_s: float = 60.0) -> Holding:
    holding = make_holding(request, lease_s=lease_s)
    with holdings.binding(holding.key):
        assert holdings.add(holding)
    return holding


async def test_a_wire_name_finds_its_binding(told: Told) -> None:
    holdings = told.holdings()
    holding = hold(holdings)
    assert key_of(holding.binding) == holding.key
    assert holdings.get(key_of(pb.Binding(request="r", placement=1, try_number=1))) is holding
    for other in (("other", 1, 1), ("r", 2, 1), ("r", 1, 2)):
        binding = pb.Binding(request=other[0], placement=other[1], try_number=other[2])
        assert holdings.get(key_of(binding)) is None


async def test_it_ends_once(told: Told) -> None:
    holdings = told.holdings()
    holding = hold(holdings)
    hold(holdings, "other")
    for _ in range(2):
        holdings.end(holding.key)
    assert told.commands == [Release(holding.sequence)]
    assert told.ended == [holding]
    assert len(holdings) == 1
    assert holdings.get(holding.key) is None


async def test_all_of_them_end_when_the_worker_leaves(told: Told) -> None:
    holdings = told.holdings()
    both = [hold(holdings, "a"), hold(holdings, "b")]
    holdings.end_all()
    assert len(holdings) == 0
    assert told.ended == both
    assert told.commands == [Release(holding.sequence) for holding in both]


async def test_ending_stops_the_announcer_unless_it_is_the_announcer_that_ends(told: Told) -> None:
    holdings = told.holdings()
    holding, other = hold(holdings), hold(holdings, "other")

    async def end() -> None:
        holdings.end(holding.key)
        await asyncio.sleep(0)

    async def announce() -> None:
        await asyncio.Event().wait()

    holding.follower = asyncio.create_task(end())
    other.follower = asyncio.create_task(announce())
    await holding.follower  # not cancelled
    holdings.end(other.key)
    await asyncio.gather(other.follower, return_exceptions=True)
    assert other.follower.cancelled()


async def test_a_lease_runs_from_its_last_renewal(told: Told) -> None:
    holdings = told.holdings()
    kept, left = hold(holdings, "kept", lease_s=30), hold(holdings, "left", lease_s=30)
    told.now_s += 29
    assert holdings.renew([kept.binding]) == []
    assert holdings.reap() == []
    told.now_s += 2
    assert holdings.reap() == [left]
    assert (left.outcome, kept.outcome) == (Outcome.LEASE_EXPIRED, Outcome.CANCELLED)
    assert holdings.reap() == []
    assert told.commands == [Release(left.sequence)]
    assert holdings.renew([kept.binding, left.binding]) == [left.binding]
    assert holdings.num_unknown == 1


async def test_bindings_are_counted_as_they_are_made(told: Told) -> None:
    holdings = told.holdings()
    for request in ("a", "b"):
        holdings.end(hold(holdings, request).key)
    again = make_holding("b")
    assert not holdings.add(again)  # nobody is being asked
    assert (holdings.num_made, len(holdings)) == (2, 0)


async def test_a_binding_is_held_once(told: Told) -> None:
    holdings = told.holdings()
    first, second = make_holding(), make_holding()
    with holdings.binding(first.key):
        assert holdings.add(first)
        assert not holdings.add(second)
    assert holdings.get(first.key) is first


async def test_a_binding_that_is_being_made_is_known(told: Told) -> None:
    holdings = told.holdings()
    holding = make_holding()
    assert holdings.renew([holding.binding]) == [holding.binding]
    with holdings.binding(holding.key):
        assert holdings.renew([holding.binding]) == []
    assert holdings.renew([holding.binding]) == [holding.binding]
    assert len(holdings) == 0


async def test_a_release_that_overtakes_the_bind_wins(told: Told) -> None:
    holdings = told.holdings()
    holding = make_holding()
    with holdings.binding(holding.key):
        holdings.end(holding.key)
        assert holdings.renew([holding.binding]) == [holding.binding]
        assert not holdings.add(holding)
    assert len(holdings) == 0
    assert told.ended == []
    assert told.commands == []


async def test_only_what_keeps_the_engine_busy_counts(told: Told) -> None:
    holdings = told.holdings()
    first, second = hold(holdings, "first"), hold(holdings, "second")
    assert holdings.num_computing == 2
    first.is_computed = True
    assert holdings.num_computing == 1
    holdings.end(second.key)
    assert holdings.num_computing == 0
    assert len(holdings) == 1


def test_the_key_names_the_try() -> None:
    task = make_task("r", 3)
    holding = dataclasses.replace(make_holding(), task=task)
    assert holding.key == BindingKey(task.request, task.placement, TryNumber(3))


def test_a_binding_is_for_one_choice_and_not_named_after_it() -> None:
    task = msgspec.structs.replace(make_task("r", 3), choice=ChoiceIndex(2))
    holding = dataclasses.replace(make_holding(), task=task)
    assert holding.sequence == SequenceKey(task.request, task.placement, TryNumber(3), ChoiceIndex(2))
    assert key_for(holding.sequence) == holding.key == key_of(holding.binding)
