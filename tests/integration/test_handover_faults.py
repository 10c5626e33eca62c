"""Workers die, freeze, restart and refuse, Redis goes away: the request ends with the tokens of an undisturbed one."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

import decode_worker.receiver
from common.errors import BrokerUnavailable
from common.messages.ids import EntryId, Epoch
from common.messages.job import PrefillTask
from common.messages.registry import WorkerHealth, WorkerLoad
from proto import worker_pb2 as pb
from tests.support.broker_records import FINGERPRINT
from tests.support.feed_client import Answer, FeedClient, make_job
from tests.support.polling import until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import SECRET, Fabric, running_fabric

PROMPT = list(range(400, 430))
TOKENS = answer(PROMPT, 5)
SHORT_LEASE_S = 0.3


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def scripted(fabric: Fabric) -> AsyncIterator[ScriptedPrefill]:
    """A prefill worker that does nothing by itself."""
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    yield prefill
    await prefill.stop()


async def test_without_a_prefill_worker(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    assert (await client.answer("r")).tokens == TOKENS
    assert decode.valve.computed("r")[0] == (0, 8)
    await fabric.until_idle()


@pytest.mark.parametrize("is_another_left", [False, True])
async def test_b050_a_prefill_worker_is_killed_in_the_middle(fabric: Fabric, is_another_left: bool) -> None:
    decode, doomed = await fabric.decode(lease_s=SHORT_LEASE_S), await fabric.prefill()
    client = await fabric.client(decode.record, doomed.record)
    await fabric.know(decode, doomed)
    doomed.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: doomed.valve.is_holding, "the first chunk is about to be computed")
    doomed.valve.let(1)
    await until(lambda: doomed.valve.computed("r") and doomed.valve.is_holding, "so is the second one")
    other = await fabric.prefill("prefill-1") if is_another_left else None
    await doomed.kill()
    await fabric.broker.registry.leave(doomed.record.worker, doomed.record.epoch)
    assert (await client.answer("r")).tokens == TOKENS
    assert bool(decode.valve.computed("r")[0] == (0, 8)) is not is_another_left
    assert other is None or other.valve.computed("r")
    await fabric.until_idle()


async def test_a_killed_prefill_worker_that_the_registry_still_lists(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 0.05)
    decode, doomed, client = await fabric.pair()
    await doomed.kill()
    await client.place(make_job("r", PROMPT), decode.record)
    assert (await client.answer("r")).tokens == TOKENS
    await fabric.until_idle()


async def test_a_task_that_nobody_binds_is_published_again_and_then_kept(
    fabric: Fabric, scripted: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 0.05)
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    tasks, published = fabric.broker.tasks(FINGERPRINT), []
    publish = tasks.publish

    async def watched_publish(task: PrefillTask) -> EntryId:
        entry = await publish(task)
        published.append((task.try_number, await fabric.num_tasks()))
        return entry

    monkeypatch.setattr(tasks, "publish", watched_publish)
    await client.place(make_job("r", PROMPT), decode.record)
    assert (await client.answer("r")).tokens == TOKENS
    assert published == [(1, 1), (2, 1)]  # the older one is deleted
    await fabric.until_idle()


@pytest.fixture
async def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow claimer is waited for, however long it takes."""
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 600.0)


@pytest.mark.usefixtures("patient")
async def test_a_task_whose_claimer_has_died_is_published_again_at_once(
    fabric: Fabric, scripted: ScriptedPrefill
) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await scripted.claim()
    heir = await fabric.prefill()
    await fabric.broker.registry.leave(scripted.record.worker, scripted.record.epoch)
    assert (await client.answer("r")).tokens == TOKENS
    assert heir.valve.computed("r")
    await fabric.until_idle()


@pytest.mark.usefixtures("patient")
async def test_a_claimer_that_nobody_listens_for_any_more_is_dead_before_the_registry_knows(
    fabric: Fabric, scripted: ScriptedPrefill
) -> None:
    decode = await fabric.decode(lease_s=SHORT_LEASE_S)
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await scripted.claim()
    heir = await fabric.prefill()
    await scripted.stop_listening()
    assert (await client.answer("r")).tokens == TOKENS
    assert heir.valve.computed("r")
    assert scripted.record in [state.record for state in await fabric.broker.registry.workers()]
    await fabric.until_idle()


@pytest.mark.usefixtures("patient")
async def test_a_claimer_that_lives_has_its_time(fabric: Fabric, scripted: ScriptedPrefill) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    task = (await scripted.claim()).task
    await until(lambda: scripted.num_renewals > 2, "it was asked whether it lives")
    assert await fabric.num_tasks() == 1
    assert (await scripted.bind(decode.record, binding_of(task))).verdict == pb.VERDICT_GO
    await scripted.commit(decode.record, binding_of(task), failure="nan")
    heir = await fabric.prefill()
    assert (await client.answer("r")).tokens == TOKENS
    assert heir.valve.computed("r")
    await fabric.until_idle()


async def test_the_last_prefill_worker_leaves_before_it_has_bound(fabric: Fabric, scripted: ScriptedPrefill) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await scripted.claim()
    await fabric.broker.registry.beat(scripted.record, WorkerLoad(health=WorkerHealth.DRAINING))
    assert (await client.answer("r")).tokens == TOKENS
    await fabric.until_idle()


async def test_b042_the_prefill_worker_has_a_smaller_pool(fabric: Fabric) -> None:
    decode, prefill = await fabric.decode(), await fabric.prefill(num_blocks=4)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    await client.place(make_job("long", PROMPT), decode.record)
    assert (await client.answer("long")).tokens == TOKENS
    assert not prefill.valve.computed("long")
    await client.place(make_job("short", PROMPT[:10]), decode.record)
    assert (await client.answer("short")).tokens == answer(PROMPT[:10], 5)
    await fabric.until_idle()


async def test_a_frozen_prefill_worker_is_given_up(fabric: Fabric, scripted: ScriptedPrefill) -> None:
    decode = await fabric.decode(lease_s=SHORT_LEASE_S)
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await scripted.bind(decode.record, binding_of((await scripted.claim()).task))
    scripted.is_answering.clear()
    assert (await client.answer("r")).tokens == TOKENS, "computed here: there is no other one"
    await fabric.until_idle()


async def test_a_binding_that_is_not_held_any_more_is_tried_again_at_once(
    fabric: Fabric, scripted: ScriptedPrefill
) -> None:
    decode = await fabric.decode(lease_s=SHORT_LEASE_S)
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await scripted.bind(decode.record, binding_of((await scripted.claim()).task))
    await until(lambda: scripted.num_renewals >= 3, "the lease is renewed")
    scripted.holds = False
    second = (await scripted.claim()).task
    assert second.try_number == 2
    await client.cancel(decode.record, "r")
    await fabric.until_idle()


async def test_b048_a_prefill_worker_restarts_at_its_address(fabric: Fabric, scripted: ScriptedPrefill) -> None:
    decode = await fabric.decode(lease_s=1.0)
    client = await fabric.client(decode.record)
    await client.place(make_job("old", PROMPT), decode.record)
    await scripted.bind(decode.record, binding_of((await scripted.claim()).task))
    # From now on another incarnation answers there; a renewal to the old one is under way when the new one is called.
    old = scripted.record
    scripted.record = msgspec.structs.replace(old, epoch=Epoch(old.epoch + 1), transfer=None)
    await fabric.broker.registry.beat(scripted.record, WorkerLoad(health=WorkerHealth.READY))
    await client.place(make_job("new", PROMPT), decode.record)
    new = (await scripted.claim()).task
    assert (await scripted.bind(decode.record, binding_of(new))).ids
    again = (await scripted.claim()).task  # the restart was noticed
    assert (again.request, again.try_number) == ("old", 2)
    await client.cancel(decode.record, "old")
    num_renewals = scripted.num_renewals
    await until(lambda: scripted.num_renewals > num_renewals + 1, "renewing goes on")
    await client.cancel(decode.record, "new")
    await until(lambda: ("new", 1, 1) in scripted.released, "and so does releasing")
    await fabric.until_idle()


async def test_redis_is_away_when_a_task_is_published(
    fabric: Fabric, scripted: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _with_broken(fabric, monkeypatch, "publish", BrokerUnavailable("away"))


async def test_redis_is_away_when_a_task_is_deleted(
    fabric: Fabric, scripted: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    _break(fabric, monkeypatch, "delete", BrokerUnavailable("away"))
    await client.place(make_job("r", PROMPT), decode.record)
    task = (await scripted.claim()).task
    await scripted.bind(decode.record, binding_of(task))
    await scripted.announce(decode.record, binding_of(task), scripted.compute(PROMPT))
    await scripted.commit(decode.record, binding_of(task), TOKENS[0])
    assert await client.answer("r") == Answer(TOKENS, "length")
    await until(lambda: decode.is_idle, "nothing is left of it")


async def test_an_unknown_failure_in_publishing_is_no_reason_to_hang(
    fabric: Fabric, scripted: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _with_broken(fabric, monkeypatch, "publish", ZeroDivisionError())


async def test_a_request_that_is_cancelled_while_its_task_is_published_leaves_no_task(
    fabric: Fabric, scripted: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    tasks, is_called, may_go_on = fabric.broker.tasks(FINGERPRINT), asyncio.Event(), asyncio.Event()
    publish = tasks.publish

    async def slow_publish(*arguments: object) -> EntryId:
        entry = await publish(*arguments)  # type: ignore[arg-type]  # passed on
        is_called.set()
        await may_go_on.wait()  # the answer is on its way
        return entry

    monkeypatch.setattr(tasks, "publish", slow_publish)
    await client.place(make_job("r", PROMPT), decode.record)
    await is_called.wait()
    await client.cancel(decode.record, "r")
    may_go_on.set()
    await until(lambda: decode.is_idle, "its pages are free")
    assert await fabric.num_tasks() == 0


async def test_a_prefill_worker_that_must_leave_in_the_middle_costs_nothing(fabric: Fabric) -> None:
    decode, leaver = await fabric.decode(), await fabric.prefill(drain_s=0.0)
    client = await fabric.client(decode.record)
    await fabric.know(decode, leaver)
    leaver.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: leaver.valve.is_holding, "its prompt is being computed")
    leaver.signals.stop.set()
    assert (await client.answer("r")).tokens == TOKENS
    assert "try_lost" not in client.kinds("r"), "nobody has died"
    leaver.valve.open()
    assert await leaver.task == 0
    await fabric.until_idle()


async def test_an_engine_that_raises_ends_its_worker(fabric: Fabric) -> None:
    decode, prefill = await fabric.decode(lease_s=SHORT_LEASE_S), await fabric.prefill()
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    prefill.valve.fail(ZeroDivisionError())
    await client.place(make_job("r", PROMPT), decode.record)
    assert await prefill.task == 1
    assert (await client.answer("r")).tokens == TOKENS
    await fabric.until_idle()
    await client.place(make_job("awaited", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("awaited") == ["accepted"], "its prompt is awaited")
    decode.valve.fail(ZeroDivisionError())
    await client.place(make_job("other", PROMPT), decode.record)
    assert await decode.task == 1
    assert (await client.answer("awaited")).reason == "worker_draining"
    await _is_lost_without_a_word(client, "other")
    assert await fabric.broker.registry.workers() == []


async def test_an_event_that_cannot_be_handled_ends_its_worker(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    monkeypatch.setattr(decode.worker._emitter, "emit", fail)
    await client.place(make_job("r", PROMPT), decode.record)
    assert await decode.task == 1  # else the request would wait for ever
    await _is_lost_without_a_word(client, "r")


async def test_an_engine_that_raises_while_its_worker_drains(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    decode.signals.stop.set()
    await until(lambda: decode.edge.health is WorkerHealth.DRAINING, "it drains")
    decode.valve.fail(ZeroDivisionError())
    assert await decode.task == 1
    await _is_lost_without_a_word(client, "r")


async def _is_lost_without_a_word(client: FeedClient, request: str) -> None:
    """Its feed breaks as if the process had been killed, which counts against the request: handed back at no cost, one
    that makes engines raise would go on doing so."""
    await until(lambda: all(task.done() for task in client._tasks), "the feeds have ended")
    assert "failed" not in client.kinds(request)


async def _with_broken(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    _break(fabric, monkeypatch, method, error)
    await client.place(make_job("r", PROMPT), decode.record)
    assert await client.answer("r") == Answer(TOKENS, "length")
    await fabric.until_idle()


def _break(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(fabric.broker.tasks(FINGERPRINT), method, fail)
