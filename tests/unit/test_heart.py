"""A worker's heart: beats soon after a change, goes on while Redis is away, and publishes the card again afterwards."""

import asyncio
import logging

import pytest

from common.broker.memory_broker import MemoryBroker
from common.errors import BrokerUnavailable
from common.lifecycle.awake_clock import AwakeClock
from common.messages.registry import ModelCard, WorkerLoad, WorkerRecord
from common.runtime import heart as heart_module
from common.runtime.heart import Heart
from tests.support.background import running
from tests.support.broker_records import MODEL, make_card, worker_load, worker_record
from tests.support.polling import until


class Patient:
    """A registry that counts beats and can be away, and the load that is told to it."""

    def __init__(self) -> None:
        self.registry = MemoryBroker(MODEL).registry
        self.is_away = False
        self.num_free = 100
        self.loads: list[int] = []
        self.num_cards = 0
        self.now_s = 0.0
        self.clock = AwakeClock(tick_s=1.0, tolerance_s=1.0, settle_s=1.0, clock=lambda: self.now_s)
        self.num_returns = 0
        self.heart = Heart(self, worker_record(), make_card(), self._load, self.clock, self._note_return)  # type: ignore[arg-type]  # what a heart needs of it

    def _load(self) -> WorkerLoad:
        return worker_load(self.num_free)

    def _note_return(self) -> None:
        self.num_returns += 1

    async def beat(self, record: WorkerRecord, load: WorkerLoad) -> None:
        self._check()
        self.loads.append(load.blocks_free)
        await self.registry.beat(record, load)

    async def publish_card(self, card: ModelCard) -> None:
        self._check()
        self.num_cards += 1

    async def leave(self, *worker: object) -> None:
        self._check()
        await self.registry.leave(*worker)  # type: ignore[arg-type]  # passed on

    def _check(self) -> None:
        if self.is_away:
            raise BrokerUnavailable("away")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    monkeypatch.setattr(heart_module, "MIN_INTERVAL_S", 0.005)
    return Patient()


async def test_the_first_beat_registers_and_brings_the_card(patient: Patient) -> None:
    assert not patient.heart.is_connected
    await patient.heart.beat()
    assert patient.heart.is_connected
    assert [state.record for state in await patient.registry.workers()] == [worker_record()]
    assert patient.num_cards == 1
    await patient.heart.beat()
    assert (len(patient.loads), patient.num_cards) == (2, 1)


async def test_a_change_is_told_soon(patient: Patient) -> None:
    async with running(patient.heart.run()):
        await until(lambda: patient.loads == [100], "the first beat")
        patient.num_free = 42
        patient.heart.touch()
        await until(lambda: patient.loads == [100, 42], "the change is told", deadline_s=heart_module.INTERVAL_S / 2)


async def test_a_change_during_a_beat_is_told_by_the_next_one(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = patient.registry.beat
    may_end = asyncio.Event()

    async def slow_beat(record: WorkerRecord, load: WorkerLoad) -> None:
        await may_end.wait()
        await beat(record, load)

    monkeypatch.setattr(patient.registry, "beat", slow_beat)
    async with running(patient.heart.run()):
        await until(lambda: patient.loads == [100], "the first beat is under way")
        patient.num_free = 42
        patient.heart.touch()
        may_end.set()
        await until(lambda: patient.loads == [100, 42], "the change is told", deadline_s=heart_module.INTERVAL_S / 2)


async def test_it_beats_without_any_change(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart_module, "INTERVAL_S", 0.02)
    async with running(patient.heart.run()):
        await until(lambda: len(patient.loads) > 3, "it beats on")


async def test_redis_away_is_told_once_and_healed(patient: Patient, caplog: pytest.LogCaptureFixture) -> None:
    await patient.heart.beat()
    patient.is_away = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await patient.heart.beat()
    assert len(caplog.records) == 1
    assert not patient.heart.is_connected
    patient.is_away = False
    await patient.heart.beat()
    assert patient.heart.is_connected
    assert patient.num_cards == 2  # Redis may have lost everything
    assert patient.num_returns == 1


async def test_redis_away_at_the_start_is_told_too(patient: Patient, caplog: pytest.LogCaptureFixture) -> None:
    patient.is_away = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await patient.heart.beat()
    assert len(caplog.records) == 1


async def test_a_beat_that_fails_because_the_worker_was_paused_counts_for_nothing(
    patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    await patient.heart.beat()
    patient.clock.tick()
    patient.is_away = True
    patient.now_s = 15.0  # its own timeout has struck while it could not read
    await patient.heart.beat()
    assert patient.heart.is_connected
    assert caplog.records == []
    assert patient.heart._changed.is_set()  # it beats again at once
    patient.clock.tick()
    patient.now_s = 16.5  # the pause is over, and Redis really is away
    await patient.heart.beat()
    assert not patient.heart.is_connected


async def test_leaving(patient: Patient) -> None:
    await patient.heart.beat()
    await patient.heart.leave()
    assert await patient.registry.workers() == []
    patient.is_away = True
    await patient.heart.leave()  # best effort
