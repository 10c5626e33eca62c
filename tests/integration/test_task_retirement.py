"""Tasks are deleted by their author even if Redis failed when they were published, or when they were to be deleted."""

from collections.abc import AsyncIterator

import pytest

from common.errors import BrokerUnavailable
from common.messages.ids import EntryId
from common.messages.job import PrefillTask
from decode_worker.worker import DecodeWorker
from tests.support.broker_records import FINGERPRINT
from tests.support.feed_client import make_job
from tests.support.polling import until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, Node, running_fabric

PROMPT = list(range(400, 430))
TOKENS = answer(PROMPT, 5)


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


async def test_redis_comes_back_after_a_task_could_not_be_deleted(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, _, client = await fabric.pair()
    with monkeypatch.context() as away:
        away.setattr(fabric.broker.tasks(FINGERPRINT), "delete", _away)
        await client.place(make_job("r", PROMPT), decode.record)
        assert (await client.answer("r")).tokens == TOKENS
        await until(lambda: decode.is_idle, "no page waits for Redis")
        assert await fabric.num_tasks() == 1
    await _until_no_task_is_left(fabric)
    await fabric.until_idle()


@pytest.mark.parametrize("is_bound_before", [False, True])
async def test_the_reply_to_a_publication_is_lost(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, is_bound_before: bool
) -> None:
    """The task stands there and its author does not know its id: whoever binds it tells."""
    decode, _, client = await fabric.pair()
    tasks = fabric.broker.tasks(FINGERPRINT)
    publish = tasks.publish
    late: list[PrefillTask] = []

    async def publish_unheard(task: PrefillTask) -> EntryId:
        if task.try_number > 1:
            return await publish(task)
        if is_bound_before:
            await publish(task)
            await until(lambda: decode.worker._receiver.attempts(), "the task is bound")
        else:
            late.append(task)  # a Redis that was frozen appends it when nobody waits for it any more
        raise BrokerUnavailable("the reply is lost")

    monkeypatch.setattr(tasks, "publish", publish_unheard)
    await client.place(make_job("r", PROMPT), decode.record)
    assert (await client.answer("r")).tokens == TOKENS
    for task in late:
        await publish(task)
    assert bool(late) is not is_bound_before
    await _until_no_task_is_left(fabric)
    await fabric.until_idle()


@pytest.mark.parametrize("num_prefill_workers", [1, 2])
async def test_a_task_is_delivered_twice(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, num_prefill_workers: int
) -> None:
    """Its author knows the copy from whoever claims it: the worker that holds the try, or another one."""
    decode, prefill, client = await fabric.pair()
    workers = [prefill] + [await fabric.prefill(f"prefill-{number}") for number in range(1, num_prefill_workers)]
    for worker in workers:
        worker.valve.close()
    tasks = fabric.broker.tasks(FINGERPRINT)
    publish = tasks.publish

    async def publish_twice(task: PrefillTask) -> EntryId:
        await publish(task)
        return await publish(task)

    monkeypatch.setattr(tasks, "publish", publish_twice)
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: len(_entries(decode)) == 2, "the author knows of both")
    for worker in workers:
        worker.valve.open()
    assert (await client.answer("r")).tokens == TOKENS
    await _until_no_task_is_left(fabric)
    await fabric.until_idle()


def _entries(decode: Node[DecodeWorker]) -> set[EntryId]:
    return {entry for _, attempt in decode.worker._receiver.attempts() for entry in attempt.entries}


async def _until_no_task_is_left(fabric: Fabric) -> None:
    async def is_gone() -> bool:
        return not await fabric.num_tasks()

    await until(is_gone, "the task is deleted", 10.0)


async def _away(entry: EntryId) -> None:
    raise BrokerUnavailable("away")
