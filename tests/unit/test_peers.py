"""Who a worker pairs with: incarnations that are registered, of its own fingerprint, ready for new work."""

import logging

import msgspec
import pytest

from common.broker.memory_broker import MemoryBroker
from common.errors import BrokerUnavailable
from common.lifecycle.awake_clock import AwakeClock
from common.messages.ids import Epoch, Fingerprint, WorkerId
from common.messages.registry import Role, WorkerHealth, WorkerRecord
from common.runtime import peers as peers_module
from common.runtime.peers import Peers
from tests.support.background import running
from tests.support.broker_records import FINGERPRINT, MODEL, worker_load, worker_record
from tests.support.polling import until


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MODEL)


DOUBT_S = 6.0


class Time:
    """Moves as told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = AwakeClock(tick_s=1.0, tolerance_s=1.0, settle_s=1.0, clock=lambda: self.now_s)

    def pass_by(self, duration_s: float) -> None:
        """Let time pass while the process runs."""
        for _ in range(round(duration_s)):
            self.now_s += 1.0
            self.clock.tick()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def peers(broker: MemoryBroker, time: Time) -> Peers:
    return Peers(broker.registry, FINGERPRINT, time.clock, DOUBT_S)


def foreign(name: str, epoch: int = 9) -> WorkerRecord:
    return msgspec.structs.replace(worker_record(name, epoch), fingerprint=Fingerprint("0ther"))


async def test_an_incarnation_is_found_by_its_epoch(broker: MemoryBroker, peers: Peers) -> None:
    await broker.registry.beat(worker_record("decode-0", 1), worker_load())
    assert peers.find(WorkerId("decode-0"), Epoch(1)) is None  # not looked yet
    await peers.refresh()
    assert peers.find(WorkerId("decode-0"), Epoch(1)) == worker_record("decode-0", 1)
    assert peers.find(WorkerId("decode-0"), Epoch(2)) is None
    assert peers.find(WorkerId("decode-1"), Epoch(1)) is None


async def test_b048_a_restart_replaces_the_old_incarnation(broker: MemoryBroker, peers: Peers) -> None:
    for epoch in (1, 2):
        await broker.registry.beat(worker_record("decode-0", epoch), worker_load())
        await peers.refresh()
    assert peers.find(WorkerId("decode-0"), Epoch(1)) is None
    assert peers.find(WorkerId("decode-0"), Epoch(2)) is not None


@pytest.mark.parametrize("health", list(WorkerHealth))
async def test_only_ready_workers_take_new_work(broker: MemoryBroker, peers: Peers, health: WorkerHealth) -> None:
    record = worker_record("prefill-0", 1, role=Role.PREFILL)
    await broker.registry.beat(record, worker_load(health=health))
    await broker.registry.beat(worker_record("decode-0", 2), worker_load())
    await peers.refresh()
    assert peers.ready(Role.PREFILL) == ([record] if health is WorkerHealth.READY else [])
    assert peers.find(WorkerId("prefill-0"), Epoch(1)) == record  # what it holds it still serves


async def test_b043_another_fingerprint_is_refused_in_words_once(
    broker: MemoryBroker, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.registry.beat(foreign("decode-9"), worker_load())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await peers.refresh()
    assert peers.find(WorkerId("decode-9"), Epoch(9)) is None
    assert peers.ready(Role.DECODE) == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert "decode-9" in line
    assert "0ther" in line
    assert str(FINGERPRINT) in line
    await broker.registry.beat(foreign("decode-9", 10), worker_load())  # a restart is another one
    with caplog.at_level(logging.WARNING):
        await peers.refresh()
    assert len(caplog.records) == 2


async def test_while_redis_is_away_the_last_view_stays(
    broker: MemoryBroker, peers: Peers, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "REFRESH_S", 0.005)
    await broker.registry.beat(worker_record("decode-0", 1), worker_load())
    num_calls = 0

    async def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        raise BrokerUnavailable("away")

    async with running(peers.watch()):
        await until(lambda: peers.ready(Role.DECODE), "it is seen")
        with monkeypatch.context() as patch:
            patch.setattr(broker.registry, "workers", fail)
            await until(lambda: num_calls > 2, "Redis is away")
            assert peers.ready(Role.DECODE)
        await broker.registry.leave(WorkerId("decode-0"), Epoch(1))
        await broker.registry.beat(worker_record("decode-1", 2), worker_load())
        await until(lambda: peers.find(WorkerId("decode-1"), Epoch(2)), "it is back")
        assert peers.find(WorkerId("decode-0"), Epoch(1))  # its heartbeat may be late for the same reason
        time.pass_by(DOUBT_S)
        await until(lambda: not peers.find(WorkerId("decode-0"), Epoch(1)), "the worker is gone")


async def test_after_a_pause_of_our_own_nobody_is_missed_at_once(
    broker: MemoryBroker, peers: Peers, time: Time
) -> None:
    """Whoever was suspended together with Redis and all others finds every heartbeat outdated."""
    await broker.registry.beat(worker_record("decode-0", 1), worker_load())
    await peers.refresh()
    time.clock.tick()
    time.now_s += 15
    await broker.registry.leave(WorkerId("decode-0"), Epoch(1))
    await peers.refresh()
    assert peers.is_in_doubt
    assert peers.find(WorkerId("decode-0"), Epoch(1))
    time.pass_by(2)
    assert not peers.is_in_doubt
    await peers.refresh()
    assert not peers.find(WorkerId("decode-0"), Epoch(1))


async def test_while_in_doubt_a_restart_still_replaces_the_old_incarnation(
    broker: MemoryBroker, peers: Peers, time: Time
) -> None:
    await broker.registry.beat(worker_record("decode-0", 1), worker_load())
    await peers.refresh()
    time.now_s += 15
    await broker.registry.beat(worker_record("decode-0", 2), worker_load())
    await peers.refresh()
    assert peers.is_in_doubt
    assert peers.find(WorkerId("decode-0"), Epoch(1)) is None


async def test_a_silent_worker_is_counted_on_again_after_a_while_or_when_it_speaks(
    broker: MemoryBroker, peers: Peers, time: Time
) -> None:
    records = [worker_record(f"prefill-{number}", number, role=Role.PREFILL) for number in (1, 2)]
    for record in records:
        await broker.registry.beat(record, worker_load())
    await peers.refresh()
    for record in records:
        peers.shun(record.epoch)
    assert peers.ready(Role.PREFILL) == []
    assert peers.find(records[0].worker, records[0].epoch) == records[0], "it may bind"
    peers.hear(records[0].epoch)
    assert peers.ready(Role.PREFILL) == records[:1]
    time.pass_by(DOUBT_S)
    assert peers.ready(Role.PREFILL) == records
