"""A prefill worker that is told to stop: what it has begun is handed over, and it ends in time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import prefill_worker.intake
from common.messages.registry import WorkerHealth
from tests.support.broker_records import FINGERPRINT
from tests.support.polling import until
from tests.support.scripted_author import ScriptedAuthor
from tests.support.tagged_pages import answer
from tests.support.told_states import PATIENCE_S, readiness, state_of, until_told
from tests.support.worker_fabric import SECRET, Fabric, running_fabric

PROMPT = list(range(600, 630))
LONG_S = 300.0
"""A timeout that no test may wait for."""


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    monkeypatch.setattr(prefill_worker.intake, "BIND_USUAL_S", LONG_S)  # on a busy machine everybody is late
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def author(fabric: Fabric) -> AsyncIterator[ScriptedAuthor]:
    author = ScriptedAuthor(fabric.broker, SECRET)
    await author.start()
    yield author
    await author.stop()


class TestDrain:
    async def test_what_the_last_claim_brings_is_computed(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill()
        await until(lambda: prefill.worker._intake._is_claiming, "a claim is under way", PATIENCE_S)
        prefill.signals.stop.set()
        await until(lambda: prefill.edge.health is WorkerHealth.DRAINING, "it drains", PATIENCE_S)
        await author.publish("r", PROMPT)
        await author.committed()
        assert not prefill.task.done()
        await author.publish("later", PROMPT)
        await author.release(prefill.record, "r")
        assert await prefill.task == 0
        assert [bind.binding.request for bind in author.binds] == ["r"]
        assert await fabric.broker.tasks(FINGERPRINT).num_tasks() == 2  # "later" is left to others

    async def test_it_is_not_open_and_leaves_the_registry(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill()
        await author.publish("r", PROMPT)
        await author.committed()
        prefill.signals.stop.set()
        await until_told(fabric, prefill, WorkerHealth.DRAINING)
        state = await state_of(fabric, prefill)
        assert state is not None
        assert not state.load.is_open
        assert await readiness(prefill) == (503, "draining")
        await author.release(prefill.record, "r")
        assert await prefill.task == 0
        assert await state_of(fabric, prefill) is None

    async def test_running_prompts_are_finished_first(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill()
        prefill.valve.close()
        await author.publish("r", PROMPT)
        await until(lambda: prefill.valve.is_holding, "the first chunk is about to be computed", PATIENCE_S)
        prefill.signals.stop.set()
        await until_told(fabric, prefill, WorkerHealth.DRAINING)
        prefill.valve.open()
        assert (await author.committed()).token == answer(PROMPT, 1)[0]
        await author.release(prefill.record, "r")
        assert await prefill.task == 0

    async def test_a_decode_worker_that_never_pulls_holds_it_for_a_lease(
        self, fabric: Fabric, author: ScriptedAuthor
    ) -> None:
        author.lease_s = 0.3
        prefill = await fabric.prefill()
        await author.publish("r", PROMPT)
        await author.committed()
        prefill.signals.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await prefill.task == 0
        assert prefill.is_idle

    async def test_it_ends_in_time_whatever_is_left(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill(drain_s=0.2)
        await author.publish("r", PROMPT)
        await author.committed()
        prefill.signals.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await prefill.task == 0
