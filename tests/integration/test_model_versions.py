"""Two versions of a model under one name, as during an upgrade: a request is answered by one of them alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from common.broker.protocols import Candidate, Placed
from common.errors import Overloaded, WorkerLost
from common.messages.ids import Epoch, Fingerprint, RequestId, WorkerId
from common.messages.registry import Role, WorkerHealth, WorkerLoad
from common.messages.sampling import SamplingParams
from gateway import placing as placing_module
from gateway.engine import GenerateRequest
from gateway.streams import Source
from proto import worker_pb2 as pb
from tests.support.broker_records import make_card, make_job
from tests.support.dispatch_harness import DEADLINE_S, DispatchHarness, answer, ids_of, job_of, quicken
from tests.support.dispatch_scenes import until_waiting
from tests.support.polling import until
from tests.support.scripted_worker import MODEL, ScriptedWorker

OLD, NEW = Fingerprint("old"), Fingerprint("new")


class Upgrade(DispatchHarness):
    """A gateway and workers of both versions, each with one seat."""

    async def add_version(self, fingerprint: Fingerprint) -> ScriptedWorker:
        """Start a worker of that version."""
        number = self.num_workers + 1
        return await self.add_worker(f"decode-{number}", number, seats=1, fingerprint=fingerprint)

    async def ids(self, fingerprint: Fingerprint) -> list[int]:
        """Return the answer to a request whose ids that version's tokenizer has made."""
        sampling = SamplingParams(seed=1, max_tokens=8, stop_ids=(2,))
        return ids_of(
            await self.collect(GenerateRequest(RequestId("r"), MODEL, [5, 6, 7], sampling, fingerprint=fingerprint))
        )


@pytest.fixture
async def upgrade(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Upgrade]:
    """A gateway with quick timers."""
    quicken(monkeypatch)
    running = Upgrade()
    yield running
    await running.close()


@pytest.mark.parametrize("version", [OLD, NEW])
async def test_a_request_goes_to_the_version_of_its_tokenizer(upgrade: Upgrade, version: Fingerprint) -> None:
    workers = {OLD: await upgrade.add_version(OLD), NEW: await upgrade.add_version(NEW)}
    running = asyncio.create_task(upgrade.ids(version))
    answer(workers[version], await job_of(workers[version]), [9])
    assert await running == [9]


async def test_a_stream_is_never_continued_by_another_version(
    upgrade: Upgrade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing_module, "FAILOVER_WAIT_S", 0.2)
    old = await upgrade.add_version(OLD)
    new = await upgrade.add_version(NEW)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(old, await job_of(old), [9], finish=None)
    await old.stop()
    with pytest.raises(WorkerLost, match="another version"):
        await running
    assert new.jobs.empty()


async def test_a_stream_goes_on_at_its_own_version(upgrade: Upgrade) -> None:
    old = await upgrade.add_version(OLD)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(old, await job_of(old), [9], finish=None)
    await upgrade.add_version(NEW)
    other_old = await upgrade.add_version(OLD)
    await old.stop()
    answer(other_old, await job_of(other_old), [10])
    assert await running == [9, 10]


async def test_a_stream_waits_for_a_worker_of_its_own_version(upgrade: Upgrade) -> None:
    """One that restarts has to load its model first."""
    old = await upgrade.add_version(OLD)
    new = await upgrade.add_version(NEW)
    running = asyncio.create_task(upgrade.ids(OLD))
    answer(old, await job_of(old), [9], finish=None)
    await old.stop()
    await until(lambda: not upgrade.feeds.is_connected(Source(old.worker, old.epoch)))
    restarted = await upgrade.add_version(OLD)
    answer(restarted, await job_of(restarted), [10])
    assert await running == [9, 10]
    assert new.jobs.empty()


async def test_a_waiting_job_waits_for_its_own_version(upgrade: Upgrade) -> None:
    """And nobody of another version waits behind it."""
    old = await upgrade.add_version(OLD)
    await old.beat(num_running=1)  # no seat is left: the request waits
    running = asyncio.create_task(upgrade.ids(OLD))
    await until_waiting(upgrade)
    new = await upgrade.add_version(NEW)
    other = make_job("other")
    assert await upgrade.broker.jobs.place(other, 1, [Candidate(new.worker, new.epoch)]) == Placed(
        new.worker, new.epoch
    )
    assert (await job_of(new)).request == "other"
    await old.beat()
    answer(old, await job_of(old), [9])
    assert await running == [9]
    assert new.jobs.empty()


async def test_a_request_that_another_version_answers_is_placed_again(upgrade: Upgrade) -> None:
    """Whoever gave it the job."""
    old = await upgrade.add_version(OLD)
    await old.beat(num_running=1)
    running = asyncio.create_task(upgrade.ids(OLD))
    await until_waiting(upgrade)
    new = await upgrade.add_version(NEW)
    await until(lambda: upgrade.feeds.is_connected(Source(new.worker, new.epoch)), "its feed", DEADLINE_S)
    answer(new, make_job("r", gateway=upgrade.gateway), [8])
    await until(lambda: upgrade.count("placements", kind="again") == 1, "another placement", DEADLINE_S)
    await old.beat()
    again = await job_of(old)
    assert (again.placement, again.choices[0].shown) == (2, b"")
    answer(old, again, [9])
    assert await running == [9]
    async with asyncio.timeout(DEADLINE_S):
        assert await new.cancels.get() == ("r", 1)


async def test_another_version_cannot_decline_for_this_one(upgrade: Upgrade) -> None:
    """It knows other tokens: what it cannot run, this one may."""
    old = await upgrade.add_version(OLD)
    await old.beat(num_running=1)
    running = asyncio.create_task(upgrade.ids(OLD))
    await until_waiting(upgrade)
    new = await upgrade.add_version(NEW)
    await until(lambda: upgrade.feeds.is_connected(Source(new.worker, new.epoch)), "its feed", DEADLINE_S)
    new.send(
        make_job("r", gateway=upgrade.gateway), failed=pb.Failed(message="an unknown token", code="invalid_request")
    )
    await until(lambda: upgrade.count("placements", kind="again") == 1, "another placement", DEADLINE_S)
    await old.beat()
    answer(old, await job_of(old), [9])
    assert await running == [9]


async def test_ids_of_one_version_are_never_given_to_another(upgrade: Upgrade) -> None:
    """They were made by its tokenizer: the client asks again, and the next request is made by the new one's."""
    new = await upgrade.add_version(NEW)
    with pytest.raises(Overloaded, match="another version"):
        await upgrade.ids(OLD)
    assert new.jobs.empty()


async def test_the_card_follows_the_decode_workers(upgrade: Upgrade) -> None:
    """A prefill worker of the old version does not keep its tokenizer in use."""
    old = await upgrade.add_version(OLD)
    await upgrade.broker.registry.publish_card(replace(make_card(), fingerprint=OLD))
    await until(lambda: [card.fingerprint for card in upgrade.roster.cards()] == [OLD])
    prefill = replace(old.record, worker=WorkerId("prefill-1"), epoch=Epoch(9), role=Role.PREFILL)
    await upgrade.broker.registry.beat(prefill, WorkerLoad(health=WorkerHealth.READY))
    await upgrade.add_version(NEW)
    await upgrade.broker.registry.publish_card(replace(make_card(), fingerprint=NEW))
    await old.stop()
    await until(lambda: [card.fingerprint for card in upgrade.roster.cards()] == [NEW])
