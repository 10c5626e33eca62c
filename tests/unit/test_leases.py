"""Leases under a clock of the test: renewed while their holder answers, given up before it may let go."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from common.lifecycle.awake_clock import AwakeClock
from common.messages.ids import Epoch, PlacementNumber, RequestId, TryNumber, WorkerId
from common.messages.registry import Role, WorkerRecord
from common.rpc.channels import Channels
from common.scheduling.sequence import SequenceKey
from decode_worker import releases
from decode_worker.reception import Attempt, AttemptLost, TryLoss
from decode_worker.releases import REFUSED_SHARE, RPC_TIMEOUT_S, Leases
from proto import worker_pb2 as pb
from tests.support.background import running
from tests.support.broker_records import worker_record
from tests.support.polling import turns, until

LEASE_S = 6.0
INTERVAL_S = LEASE_S / 6

Answer = Callable[[pb.RenewRequest, float], pb.RenewReply]


@dataclass
class Network:
    """Prefill workers by epoch, and the time that passes while they are asked."""

    now: float = 1000.0
    answers: dict[int, Answer] = field(default_factory=dict)
    timeouts: list[float] = field(default_factory=list)
    unlisted: set[int] = field(default_factory=set)
    """Epochs that the registry does not have (any more)."""

    def is_listed(self, record: WorkerRecord) -> bool:
        return record.epoch not in self.unlisted

    def stub_for(self, channels: Channels, record: WorkerRecord) -> SimpleNamespace:
        """Return a client of one incarnation."""

        def renew(request: pb.RenewRequest, timeout: float) -> Coroutine[Any, Any, pb.RenewReply]:
            self.timeouts.append(timeout)

            async def answer() -> pb.RenewReply:
                return self.answers[record.epoch](request, timeout)

            return answer()

        return SimpleNamespace(Renew=renew)

    def monotonic(self) -> float:
        return self.now

    def holds(self, request: pb.RenewRequest, timeout: float) -> pb.RenewReply:
        """Everything is held by epoch 1."""
        return pb.RenewReply(epoch=1)

    def is_silent(self, request: pb.RenewRequest, timeout: float) -> pb.RenewReply:
        """Let the deadline pass."""
        self.now += timeout
        raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED)

    def is_gone(self, request: pb.RenewRequest, timeout: float) -> pb.RenewReply:
        """Refuse the connection at once."""
        raise _failure(grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(releases, "stub_for", network.stub_for)
    return network


@pytest.fixture
async def held(network: Network) -> list[tuple[SequenceKey, Attempt]]:
    """Attempts by key; the first is bound to epoch 1."""
    return [bound("r", network)]


def bound(request: str, network: Network, epoch: int = 1) -> tuple[SequenceKey, Attempt]:
    attempt = Attempt(TryNumber(1), frozenset({0}), asyncio.get_running_loop().create_future())
    attempt.bind(worker_record("prefill-0", epoch, role=Role.PREFILL))
    attempt.renewed_at = network.now
    return SequenceKey(RequestId(request), PlacementNumber(1)), attempt


def leases(
    held: list[tuple[SequenceKey, Attempt]],
    network: Network,
    clock: Callable[[], float] | None = None,
    lease_s: float = LEASE_S,
) -> Leases:
    return Leases(
        Channels("secret"),
        WorkerId("decode-0"),
        Epoch(5),
        lease_s,
        lambda: held,
        network.is_listed,
        clock or network.monotonic,
    )


def loss_of(attempt: Attempt) -> TryLoss:
    lost = attempt.outcome.exception()
    assert isinstance(lost, AttemptLost)
    return lost.loss


async def until_lost(network: Network, attempt: Attempt, renewing: Leases) -> float:
    """Let time pass until the attempt is lost; return how much."""
    started = network.now
    while not attempt.outcome.done():
        assert network.now < started + 2 * LEASE_S, "never given up"
        network.now += INTERVAL_S
        await renewing.renew()
    assert isinstance(attempt.outcome.exception(), AttemptLost)
    return network.now - started


async def test_an_answer_counts_from_when_it_was_asked_for(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    def answer_slowly(request: pb.RenewRequest, timeout: float) -> pb.RenewReply:
        assert [(b.request, b.placement, b.try_number) for b in request.bindings] == [("r", 1, 1)]
        assert (request.worker, request.epoch) == ("decode-0", 5)
        network.now += 0.5
        return pb.RenewReply(epoch=1)

    network.answers[1] = answer_slowly
    network.now += INTERVAL_S
    sent_at = network.now
    await leases(held, network).renew()
    (_, attempt) = held[0]
    assert attempt.renewed_at == sent_at
    assert not attempt.outcome.done()


async def test_who_does_not_answer_is_given_up_before_it_may_let_go(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    network.answers[1] = network.is_silent
    network.unlisted = {1}  # whoever is not reached may live, whatever the registry knows
    (_, attempt) = held[0]
    lost_after_s = await until_lost(network, attempt, leases(held, network))
    assert 0.7 * LEASE_S < lost_after_s < LEASE_S
    assert max(network.timeouts) == RPC_TIMEOUT_S
    assert loss_of(attempt) is TryLoss.SILENT


async def test_b048_who_refuses_and_is_not_registered_any_more_is_lost_at_once(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    held.append(bound("other", network, epoch=2))
    network.answers = {1: network.is_gone, 2: lambda request, timeout: pb.RenewReply(epoch=2)}
    network.unlisted = {1, 2}
    await leases(held, network).renew()
    assert loss_of(held[0][1]) is TryLoss.DIED
    assert not held[1][1].outcome.done()  # it answers: the registry has lost it, or does not know it yet


async def test_who_refuses_for_long_is_dead_before_the_registry_notices(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    network.answers[1] = network.is_gone
    (_, attempt) = held[0]
    assert await until_lost(network, attempt, leases(held, network)) < 3 * INTERVAL_S
    assert loss_of(attempt) is TryLoss.DIED


async def test_a_connection_that_is_made_again_is_no_death(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    renewing = leases(held, network)
    for way in (network.is_gone, network.holds) * 10:
        network.answers[1] = way
        await renewing.renew()
        network.now += LEASE_S * REFUSED_SHARE / 2
    assert not held[0][1].outcome.done()


async def test_a_holder_that_is_stalled_is_given_up(network: Network, held: list[tuple[SequenceKey, Attempt]]) -> None:
    network.answers[1] = lambda request, timeout: pb.RenewReply(epoch=1, is_stalled=True)
    await leases(held, network).renew()
    assert loss_of(held[0][1]) is TryLoss.STALLED


async def test_a_doubt_is_looked_into_at_once(network: Network, held: list[tuple[SequenceKey, Attempt]]) -> None:
    renewing = leases(held, network, lease_s=240.0)  # 40 s between two renewals
    network.answers[1] = network.holds
    async with running(renewing.run()):
        await turns()
        assert network.timeouts == []
        renewing.probe()
        await until(lambda: len(network.timeouts) == 1, "it is asked")


async def test_one_answer_in_between_is_enough(network: Network, held: list[tuple[SequenceKey, Attempt]]) -> None:
    (_, attempt) = held[0]
    renewing = leases(held, network)
    for _ in range(5):
        for way in (network.is_gone, network.is_silent, network.holds):
            network.answers[1] = way
            network.now += INTERVAL_S
            await renewing.renew()
    assert not attempt.outcome.done()


async def test_what_is_not_held_is_lost_at_once(network: Network, held: list[tuple[SequenceKey, Attempt]]) -> None:
    held.append(bound("other", network))
    unknown = pb.Binding(request="other", placement=1, try_number=1)
    network.answers[1] = lambda request, timeout: pb.RenewReply(epoch=1, unknown=[unknown])
    await leases(held, network).renew()
    assert [attempt.outcome.done() for _, attempt in held] == [False, True]
    assert loss_of(held[1][1]) is TryLoss.REFUSED


async def test_b048_another_incarnation_holds_nothing_of_ours(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    network.answers[1] = lambda request, timeout: pb.RenewReply(epoch=2)
    await leases(held, network).renew()
    assert loss_of(held[0][1]) is TryLoss.DIED


async def test_b048_incarnations_are_asked_apart(network: Network, held: list[tuple[SequenceKey, Attempt]]) -> None:
    held.append(bound("other", network, epoch=2))
    network.answers = {1: network.is_gone, 2: lambda request, timeout: pb.RenewReply(epoch=2)}
    await until_lost(network, held[0][1], leases(held, network))
    assert not held[1][1].outcome.done()


async def test_who_was_paused_itself_asks_again_before_it_gives_up(
    network: Network, held: list[tuple[SequenceKey, Attempt]]
) -> None:
    clock = AwakeClock(tick_s=LEASE_S / 24, tolerance_s=LEASE_S / 12, settle_s=INTERVAL_S, clock=network.monotonic)
    (_, attempt) = held[0]
    attempt.renewed_at = clock.now()

    def pause(request: pb.RenewRequest, timeout: float) -> pb.RenewReply:
        network.now += 2 * LEASE_S
        raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED)

    renewing = leases(held, network, clock.now)
    network.answers[1] = pause
    await renewing.renew()
    assert not attempt.outcome.done()
    clock.tick()
    network.answers[1] = network.holds
    network.now += INTERVAL_S
    clock.tick()
    await renewing.renew()
    assert attempt.renewed_at == clock.now()


async def test_an_attempt_that_nobody_has_bound_is_not_renewed(network: Network) -> None:
    attempt = Attempt(TryNumber(1), frozenset({0}), asyncio.get_running_loop().create_future())
    await leases([(SequenceKey(RequestId("r"), PlacementNumber(1)), attempt)], network).renew()
    assert network.timeouts == []


def _failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
