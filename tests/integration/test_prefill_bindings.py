"""What a prefill worker claims, computes, holds and lets go, seen by a scripted author of tasks."""

from collections.abc import AsyncIterator
from typing import cast

import pytest
from msgspec.structs import replace

import prefill_worker.intake
from common.messages.chain import chain_of
from common.messages.ids import Epoch, PlacementNumber, RequestId, TryNumber, WorkerId
from common.messages.sampling import SamplingParams
from common.rpc.channels import Channels
from common.scheduling.sequence import SequenceKey
from prefill_worker.core import PrefillCore
from prefill_worker.worker import MAX_RUNNING, PrefillWorker
from proto import worker_pb2 as pb
from tests.support.broker_records import FINGERPRINT
from tests.support.polling import until
from tests.support.scripted_author import SAMPLING, ScriptedAuthor
from tests.support.tagged_pages import BLOCK_SIZE, VOCABULARY, answer, page_of
from tests.support.worker_fabric import SECRET, Fabric, Node, running_fabric

PROMPT = list(range(600, 630))
NUM_BLOCKS = 8


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    monkeypatch.setattr(prefill_worker.intake, "BIND_USUAL_S", 60.0)  # on a busy machine everybody is late
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def author(fabric: Fabric) -> AsyncIterator[ScriptedAuthor]:
    author = ScriptedAuthor(fabric.broker, SECRET)
    await author.start()
    yield author
    await author.stop()


@pytest.fixture
async def prefill(fabric: Fabric, author: ScriptedAuthor) -> Node[PrefillWorker]:
    return await fabric.prefill()


def num_held(prefill: Node[PrefillWorker]) -> int:
    return len(prefill.worker._holdings)


async def until_released(prefill: Node[PrefillWorker]) -> None:
    await until(lambda: num_held(prefill) == 0 and prefill.is_idle, "everything is released")


def key_of_first_try(request: str) -> SequenceKey:
    return SequenceKey(RequestId(request), PlacementNumber(1), TryNumber(1))


async def test_every_page_is_announced_once_and_holds_what_it_should(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    entry = await author.publish("r", PROMPT)
    commit = await author.committed()
    assert (commit.token, commit.epoch, commit.failure) == (answer(PROMPT, 1)[0], prefill.record.epoch, "")
    pages = author.pages("r")
    assert [page.block_index for page in pages] == list(range(NUM_BLOCKS))
    memory = prefill.edge.foundation.memory
    for page in pages:
        assert memory.generations[page.page] == page.generation
        assert page_of(memory, page.page, PROMPT, page.block_index)
    assert len(author.announced) == 4  # one a chunk
    assert await fabric.num_tasks() == 1  # its author deletes it
    await author.release(prefill.record, "r")
    await until_released(prefill)
    assert entry


@pytest.mark.parametrize(
    ("prompt", "num_shown", "sampling"),
    [
        ([*PROMPT, VOCABULARY], 0, SAMPLING),
        ([*PROMPT, 5], len(PROMPT) + 1, SAMPLING),
        (PROMPT * 5, 0, SAMPLING),
        (PROMPT, 0, replace(SAMPLING, logit_bias=((VOCABULARY, 1.0),))),
        (PROMPT, 0, replace(SAMPLING, num_logprobs=1 << 20)),
    ],
    ids=["id", "no prompt", "too long", "bias", "logprobs"],
)
async def test_what_no_sound_author_sends_is_not_computed_and_nobody_else_minds(
    author: ScriptedAuthor,
    prefill: Node[PrefillWorker],
    prompt: list[int],
    num_shown: int,
    sampling: SamplingParams,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await author.publish("nonsense", prompt, num_shown=num_shown, sampling=sampling)
    await until(lambda: "sent what cannot be computed" in caplog.text, "it is refused in words")
    assert await author.renew(prefill.record, "nonsense") == ["nonsense"]  # so the author gives the try up at once
    assert not prefill.valve.spans
    await author.publish("r", PROMPT)
    assert (await author.committed()).token == answer(PROMPT, 1)[0]
    await author.release(prefill.record, "r")
    await until_released(prefill)


async def test_blocks_that_are_not_wanted_are_not_announced(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    author.first_block = 3
    await author.publish("r", PROMPT)
    await author.committed()
    assert [page.block_index for page in author.pages("r")] == list(range(3, NUM_BLOCKS))


async def test_its_own_cache_counts_and_spares_the_work(author: ScriptedAuthor, prefill: Node[PrefillWorker]) -> None:
    for request, num_cached in (("first", 0), ("second", 28)):
        await author.publish(request, PROMPT)
        commit = await author.committed(request)
        assert (commit.num_cached_tokens, commit.token) == (num_cached, answer(PROMPT, 1)[0])
        assert len(author.pages(request)) == NUM_BLOCKS
    assert prefill.valve.computed("second") == [(28, 2)]


async def test_the_early_copy_continues_what_was_shown(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    client = await fabric.client(prefill.record)
    await author.publish("r", PROMPT, num_shown=3)
    await author.committed()
    await until(lambda: client.events["r", 1], "the early copy is here")
    (event,) = client.events["r", 1]
    assert (event.tokens.index, event.tokens.is_early) == (3, True)
    assert list(event.tokens.ids) == answer(PROMPT, 1)
    assert event.tokens.chain == chain_of(PROMPT[-3:])


@pytest.mark.parametrize("verdict", [pb.VERDICT_STALE, pb.VERDICT_CANCELLED])
async def test_a_bind_that_is_refused(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric, verdict: "pb.Verdict.ValueType"
) -> None:
    author.verdicts["bind"] = verdict
    await author.publish("refused", PROMPT)
    await until(lambda: author.binds, "it has asked")
    author.verdicts["bind"] = pb.VERDICT_GO
    await author.publish("r", PROMPT)
    await author.committed()
    assert not prefill.valve.computed("refused")
    assert await fabric.num_tasks() == 2  # whose tasks they are is not its business


@pytest.mark.parametrize("verdict", [pb.VERDICT_STALE, pb.VERDICT_CANCELLED])
async def test_an_announcement_that_is_refused_ends_the_work(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], verdict: "pb.Verdict.ValueType"
) -> None:
    author.verdicts["announce"] = verdict
    prefill.valve.close()
    await author.publish("r", PROMPT)
    await until(lambda: prefill.valve.is_holding, "the first chunk is about to be computed")
    prefill.valve.let(1)
    await until(lambda: author.announced and prefill.valve.is_holding, "so is the second one")
    await until(lambda: num_held(prefill) == 0, "the binding is over")
    prefill.valve.open()
    await until_released(prefill)
    assert prefill.valve.computed("r") == [(0, 8), (8, 8)]
    assert not author.commits


async def test_a_commit_that_is_refused_ends_the_binding(author: ScriptedAuthor, prefill: Node[PrefillWorker]) -> None:
    author.verdicts["commit"] = pb.VERDICT_STALE
    await author.publish("r", PROMPT)
    await author.committed()
    await until_released(prefill)


async def test_b039_a_lease_that_is_not_renewed_ends(author: ScriptedAuthor, prefill: Node[PrefillWorker]) -> None:
    author.lease_s = 0.2
    await author.publish("r", PROMPT)
    await author.committed()
    pages = author.pages("r")
    memory = prefill.edge.foundation.memory
    await until_released(prefill)
    assert await author.renew(prefill.record, "r") == ["r"]
    # The prefix cache may keep full pages as they are; the last one cannot be what it was.
    assert memory.generations[pages[-1].page] != pages[-1].generation


async def test_a_lease_that_is_renewed_goes_on(author: ScriptedAuthor, prefill: Node[PrefillWorker]) -> None:
    author.lease_s = 0.4
    await author.publish("kept", PROMPT)
    await author.publish("left", PROMPT)
    await author.committed("kept")
    await author.committed("left")
    while num_held(prefill) == 2:
        assert await author.renew(prefill.record, "kept", "unheard of") == ["unheard of"]
    assert await author.renew(prefill.record, "kept", "left") == ["left"]


async def test_an_author_that_is_gone_when_its_pages_are_ready(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    prefill.valve.close()
    await author.publish("r", PROMPT)
    await until(lambda: prefill.valve.is_holding, "the first chunk is about to be computed")
    await author.stop()
    prefill.valve.open()
    await until_released(prefill)


async def test_a_release_may_overtake_the_answer_to_the_bind(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    author.is_answering.clear()
    await author.publish("r", PROMPT)
    await until(lambda: author.binds, "it has asked")
    await author.release(prefill.record, "r")
    author.is_answering.set()
    await author.publish("other", PROMPT)
    await author.committed("other")
    assert num_held(prefill) == 1
    assert not prefill.valve.computed("r")


async def test_a_renewal_may_overtake_the_answer_to_the_bind(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    author.is_answering.clear()
    await author.publish("r", PROMPT)
    await until(lambda: author.binds, "it has asked")
    assert await author.renew(prefill.record, "r", "other") == ["other"]
    author.is_answering.set()
    await author.committed()


async def test_the_task_of_an_author_that_is_gone_is_deleted(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    await author.publish("r", PROMPT, epoch=Epoch(author.record.epoch + 1))
    tasks = fabric.broker.tasks(FINGERPRINT)
    await until(lambda: not len(tasks._stream), "the orphan is deleted")
    assert not author.binds


async def test_the_task_of_an_author_that_dies_after_the_claim_is_deleted(
    author: ScriptedAuthor, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker.intake, "AUTHOR_CHECK_S", 0.02)
    author.is_answering.clear()  # so it dies between the claim and its answer
    await fabric.prefill()
    await author.publish("r", PROMPT)
    await until(lambda: author.binds, "it is asked")
    assert await fabric.num_tasks() == 1
    await fabric.broker.registry.leave(author.record.worker, author.record.epoch)
    tasks = fabric.broker.tasks(FINGERPRINT)
    await until(lambda: not len(tasks._stream), "the orphan is deleted")
    author.is_answering.set()


async def test_orphans_of_dead_claimers_are_swept_and_others_left(
    author: ScriptedAuthor, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker.intake, "ORPHAN_IDLE_S", 0.03)
    await author.publish("orphan", PROMPT, epoch=Epoch(author.record.epoch + 1))
    kept = await author.publish("kept", PROMPT)
    tasks = fabric.broker.tasks(FINGERPRINT)
    for _ in range(2):
        assert await tasks.claim(WorkerId("dead"), Epoch(1), 0)
    await fabric.prefill()
    await until(lambda: len(tasks._stream) == 1, "the orphan is deleted")
    assert list(tasks._stream) == [kept]


async def test_b042_a_prompt_that_the_pool_cannot_hold(fabric: Fabric, author: ScriptedAuthor) -> None:
    prefill = await fabric.prefill(num_blocks=4)
    await author.publish("r", PROMPT)
    failure = (await author.committed()).failure
    assert "30" in failure
    assert str(4 * BLOCK_SIZE) in failure
    assert not author.announced
    await until_released(prefill)


async def test_a_task_that_is_delivered_twice_is_computed_once(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    prefill.valve.close()
    await author.publish("r", PROMPT)
    await author.publish("r", PROMPT)
    await author.publish("other", PROMPT)
    await until(lambda: len(author.binds) >= 2, "all are claimed")
    prefill.valve.open()
    await author.committed("other")
    await author.committed()
    assert sum(length for _, length in prefill.valve.computed("r")) == len(PROMPT)
    assert not prefill.task.done()


async def test_it_claims_no_more_than_it_can_compute(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    prefill.valve.close()
    for number in range(3 * MAX_RUNNING):
        await author.publish(str(number), [number, 1, 2])
    await until(lambda: num_held(prefill) == MAX_RUNNING, "as many as it can compute side by side")
    other = await fabric.prefill("prefill-1")
    await until(lambda: num_held(other) == 2 * MAX_RUNNING, "the others are left to others")
    assert num_held(prefill) == MAX_RUNNING


async def test_room_is_made_by_bindings_that_end_unseen(author: ScriptedAuthor, prefill: Node[PrefillWorker]) -> None:
    prefill.valve.close()
    names = [str(number) for number in range(MAX_RUNNING)]
    for name in names:
        await author.publish(name, PROMPT)
    await until(lambda: num_held(prefill) == MAX_RUNNING, "it is full")
    await author.publish("next", PROMPT)
    await author.release(prefill.record, *names)
    prefill.valve.open()
    await author.committed("next")


async def test_an_author_that_does_not_answer_holds_up_nobody_for_long(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker.intake, "BIND_TIMEOUT_S", 0.05)
    frozen = ScriptedAuthor(fabric.broker, SECRET, "decode-y")
    await frozen.start()
    frozen.is_answering.clear()
    await frozen.publish("frozen", PROMPT)
    await author.publish("r", PROMPT)
    await author.committed()
    await frozen.stop()


async def test_b048_an_author_restarts_at_its_address_while_it_is_asked(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    author.is_answering.clear()
    await author.publish("old", PROMPT)
    await until(lambda: author.binds, "it has asked")
    channels: Channels = prefill.edge.channels
    channels.channel(author.record.address, Epoch(author.record.epoch + 1))  # whoever calls the new one first
    author.is_answering.set()
    await author.publish("new", PROMPT)
    await author.committed("new")


async def test_an_announcer_that_fails_lets_go(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(prefill.worker._announcer, "_tell", fail)
    await author.publish("r", PROMPT)
    await until(lambda: prefill.valve.computed("r"), "it is computed")
    await until_released(prefill)


async def test_a_block_that_leaks_is_noticed_when_the_engine_is_idle(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    await author.publish("r", PROMPT)
    await author.committed()
    assert prefill.edge.load.num_violations == 0
    engine = prefill.edge.engine
    assert engine is not None
    scheduler = cast(PrefillCore, engine._core)._scheduler
    scheduler._blocks._pool.share(scheduler._sequences[key_of_first_try("r")].block_ids[:1])
    await author.release(prefill.record, "r")
    await until(lambda: prefill.edge.load.num_violations == 1, "the leak is found")
    assert [record for record in caplog.records if "nobody knows" in record.getMessage()]
    assert prefill.edge.metrics.violations._value.get() == 1

    async def is_told() -> bool:
        states = await fabric.broker.registry.workers()
        return any(state.record == prefill.record and state.load.num_violations == 1 for state in states)

    await until(is_told, "the registry knows")


async def test_draining_waits_for_the_pages_to_be_pulled(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    await author.publish("r", PROMPT)
    await author.committed()
    prefill.signals.stop.set()
    await until(lambda: prefill.edge.health == "draining", "it drains")
    assert await author.renew(prefill.record, "r") == []
    assert not prefill.task.done()
    await author.release(prefill.record, "r")
    assert await prefill.task == 0
    assert prefill.is_idle
