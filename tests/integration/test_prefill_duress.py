"""A prefill worker under duress: a wedged engine, a pause, authors that do not answer, and cancels in bulk."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

import prefill_worker.intake
from common.messages.registry import Role, WorkerHealth, WorkerLoad
from common.runtime import edge
from common.runtime.warm_up import warm_up
from prefill_worker.worker import MAX_RUNNING, PrefillWorker
from proto import worker_pb2 as pb
from tests.support.broker_records import FINGERPRINT
from tests.support.polling import turns, until
from tests.support.scripted_author import ScriptedAuthor
from tests.support.tagged_pages import answer
from tests.support.told_states import PATIENCE_S, readiness, state_of, until_told
from tests.support.worker_fabric import CHUNK_SIZE, SECRET, Fabric, Node, running_fabric

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


@pytest.fixture
async def frozen(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedAuthor]:
    """An author that does not answer."""
    monkeypatch.setattr(prefill_worker.intake, "BIND_USUAL_S", 0.1)
    monkeypatch.setattr(prefill_worker.intake, "BIND_TIMEOUT_S", LONG_S)
    frozen = ScriptedAuthor(fabric.broker, SECRET, "decode-y")
    await frozen.start()
    frozen.is_answering.clear()
    yield frozen
    await frozen.stop()


def counting(owner: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with every call of an asynchronous method."""
    inner, calls = getattr(owner, method), list[None]()

    async def count(*arguments: Any) -> Any:
        calls.append(None)
        return await inner(*arguments)

    monkeypatch.setattr(owner, method, count)
    return calls


async def run_on(node: Node[PrefillWorker], duration_s: float) -> None:
    """Let the worker run so long by its own clock."""
    until_s = node.edge.clock.now() + duration_s
    await until(lambda: node.edge.clock.now() > until_s, "time has passed", PATIENCE_S)


class TestWarmUp:
    async def test_slow_first_steps_are_no_stall_and_come_before_readiness(
        self, fabric: Fabric, author: ScriptedAuthor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_begun, may_go_on = threading.Event(), threading.Event()

        def warm_up_slowly(*arguments: Any) -> None:
            has_begun.set()
            assert may_go_on.wait(PATIENCE_S)
            warm_up(*arguments)

        monkeypatch.setattr(edge, "warm_up", warm_up_slowly)
        starting = asyncio.create_task(fabric.prefill(stall_s=0.05))
        await until(has_begun.is_set, "the first step has begun", PATIENCE_S)
        await run_on(fabric.nodes[0], 1.0)  # for longer than any engine with work may stand still
        assert not fabric.nodes[0].edge.is_stalled
        assert not fabric.nodes[0].task.done()
        states = await fabric.broker.registry.workers()
        assert [state.load.health for state in states if state.record.role is Role.PREFILL] == [WorkerHealth.LOADING]
        assert not starting.done()
        may_go_on.set()
        node = await starting
        await author.publish("r", PROMPT)
        assert (await author.committed()).token == answer(PROMPT, 1)[0]
        assert node.edge.load.num_steps == len(node.valve.spans)  # what warmed it up is nobody's

    async def test_a_worker_whose_first_steps_fail_is_never_ready(
        self, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(edge, "warm_up", fail)
        with pytest.raises(AssertionError):  # the process has ended
            await fabric.prefill()
        assert fabric.nodes[0].task.result() == 1
        assert fabric.nodes[0].edge.health is not WorkerHealth.READY


class TestStall:
    async def test_a_wedged_engine_is_told_everywhere_until_it_moves(
        self, fabric: Fabric, author: ScriptedAuthor
    ) -> None:
        prefill = await fabric.prefill(stall_s=0.2)
        client = await fabric.client(prefill.record)
        await until_told(fabric, prefill, WorkerHealth.READY)
        prefill.valve.close()
        await author.publish("r", PROMPT)
        await until(lambda: prefill.valve.is_holding, "the first step runs", PATIENCE_S)
        await until_told(fabric, prefill, WorkerHealth.STALLED)
        assert await readiness(prefill) == (503, "stalled")
        assert prefill.edge.metrics.stalled._value.get() == 1
        assert (await author.renewal(prefill.record, "r")).is_stalled
        await until(lambda: client.stalled, "the gateway knows", PATIENCE_S)
        await author.publish("other", PROMPT)
        prefill.valve.open()
        await until_told(fabric, prefill, WorkerHealth.READY)
        assert await readiness(prefill) == (200, "ready")
        assert prefill.edge.metrics.stalled._value.get() == 0
        assert not (await author.renewal(prefill.record, "r")).is_stalled
        await until(lambda: not client.stalled, "the gateway knows that, too", PATIENCE_S)
        assert (await author.committed()).token == answer(PROMPT, 1)[0]
        await author.committed("other")  # claimed only now

    async def test_it_claims_nothing_while_it_is_stalled(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill(stall_s=0.2)
        prefill.valve.close()
        await author.publish("r", PROMPT)
        await until(lambda: prefill.edge.is_stalled, "it is stalled", PATIENCE_S)
        await until(lambda: prefill.worker._intake.is_at_rest, "the last claim is over", PATIENCE_S)
        await author.publish("other", PROMPT)
        await fabric.prefill("prefill-1")
        await author.committed("other")
        assert len(prefill.worker._holdings) == 1
        prefill.valve.open()

    async def test_a_hopeless_one_ends_itself(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill(stall_s=0.1)
        prefill.valve.close()
        await author.publish("r", PROMPT)
        await until(lambda: prefill.valve.is_holding, "the first step runs", PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            assert await prefill.task == 1
        assert await state_of(fabric, prefill) is None
        prefill.valve.open()

    async def test_idle_is_not_stalled(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        prefill = await fabric.prefill(stall_s=0.1)
        await author.publish("r", PROMPT)
        await author.committed()
        await run_on(prefill, 0.7)
        assert prefill.edge.health is WorkerHealth.READY
        assert not prefill.task.done()


class TestPause:
    """The loop stands as if the process were stopped; time.sleep gives no task a chance."""

    async def test_leases_outlast_a_pause_of_ours(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        author.lease_s = 0.6
        prefill = await fabric.prefill(lease_s=0.6)
        await author.publish("r", PROMPT)
        await author.committed()
        renewing = asyncio.ensure_future(author.renew(prefill.record, "r"))
        await turns()
        time.sleep(1.5)  # noqa: ASYNC251 - this is the pause
        assert await renewing == []  # it stood in the socket
        assert len(prefill.worker._holdings) == 1
        await until(lambda: len(prefill.worker._holdings) == 0, "nobody renews it any more", PATIENCE_S)

    async def test_a_pause_is_no_stall(
        self, fabric: Fabric, author: ScriptedAuthor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill = await fabric.prefill(stall_s=1.0, lease_s=0.6)
        prefill.valve.close()
        await author.publish("r", PROMPT)
        await until(lambda: prefill.valve.is_holding, "a step runs", PATIENCE_S)
        verdicts: list[bool] = []
        monkeypatch.setattr(prefill.edge.feeds, "tell_stalled", verdicts.append)
        await run_on(prefill, 0.3)  # the watch has seen the step
        time.sleep(2.0)  # noqa: ASYNC251 - this is the pause
        await run_on(prefill, 0.2)  # and looks again
        prefill.valve.open()
        await author.committed()
        assert verdicts == []

    async def test_a_pause_of_everybody_orphans_no_task(
        self, fabric: Fabric, author: ScriptedAuthor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After it Redis finds every heartbeat outdated until the next one has come."""
        monkeypatch.setattr(prefill_worker.intake, "AUTHOR_CHECK_S", 0.01)
        author.is_answering.clear()
        prefill = await fabric.prefill()
        await author.publish("r", PROMPT)
        await until(lambda: author.binds, "it is claimed", PATIENCE_S)
        registry = fabric.broker.registry
        await registry.leave(author.record.worker, author.record.epoch)
        monkeypatch.setattr(prefill.edge.clock, "_settle_s", PATIENCE_S)
        time.sleep(1.5)  # noqa: ASYNC251 - this is the pause
        checks = counting(prefill.worker._intake, "check_authors", monkeypatch)
        await until(lambda: len(checks) > 5, "it has looked for its authors", PATIENCE_S)
        assert prefill.edge.clock.is_standing
        assert await fabric.num_tasks() == 1
        await registry.beat(author.record, WorkerLoad(health=WorkerHealth.READY))
        author.is_answering.set()
        await author.committed()

    async def test_after_it_the_task_of_an_unknown_author_is_left_alone(
        self, fabric: Fabric, author: ScriptedAuthor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefill_worker.intake, "AUTHOR_CHECK_S", 0.01)
        await fabric.broker.registry.leave(author.record.worker, author.record.epoch)
        prefill = await fabric.prefill()
        monkeypatch.setattr(prefill.edge.clock, "_settle_s", PATIENCE_S)
        time.sleep(1.5)  # noqa: ASYNC251 - this is the pause
        await author.publish("r", PROMPT)
        intake = prefill.worker._intake
        await until(lambda: intake._claims and not intake._asked, "it is claimed and looked at", PATIENCE_S)
        checks = counting(intake, "check_authors", monkeypatch)
        await until(lambda: len(checks) > 5, "again and again", PATIENCE_S)
        assert prefill.edge.clock.is_standing
        assert await fabric.num_tasks() == 1
        assert author.binds == []


class TestSilentAuthors:
    async def test_one_that_does_not_answer_delays_nobody_elses_tasks(
        self, fabric: Fabric, author: ScriptedAuthor, frozen: ScriptedAuthor
    ) -> None:
        for number in range(3 * MAX_RUNNING):
            await frozen.publish(f"frozen-{number}", PROMPT)
        await author.publish("r", PROMPT)
        await fabric.prefill()
        await author.committed()
        await until(lambda: len(frozen.binds) == 3 * MAX_RUNNING, "all are asked for", PATIENCE_S)

    async def test_one_that_wakes_up_gets_its_answers(self, fabric: Fabric, frozen: ScriptedAuthor) -> None:
        for number in range(3):
            await frozen.publish(str(number), [number, *PROMPT])
        await fabric.prefill()
        await until(lambda: len(frozen.binds) == 3, "all are asked for", PATIENCE_S)
        frozen.is_answering.set()
        for number in range(3):
            assert (await frozen.committed(str(number))).token == answer([number, *PROMPT], 1)[0]


class TestCancels:
    async def test_ten_long_prompts_are_gone_before_the_next_chunk(
        self, fabric: Fabric, author: ScriptedAuthor
    ) -> None:
        """Those bound, those claimed and those still queued: a short prompt waits for one step at most."""
        prefill = await fabric.prefill(num_blocks=256)
        prefill.valve.close()
        entries = [await author.publish(f"long-{number}", [number] * 120) for number in range(10)]
        await until(lambda: len(prefill.worker._holdings) == MAX_RUNNING, "it is full", PATIENCE_S)
        await until(lambda: prefill.valve.is_holding, "the first step runs", PATIENCE_S)
        for entry in entries:
            await fabric.broker.tasks(FINGERPRINT).delete(entry)
        await author.release(prefill.record, *(f"long-{number}" for number in range(10)))
        await author.publish("short", PROMPT[:4])
        prefill.valve.let(1)  # the step that had begun
        await until(lambda: prefill.valve.is_holding, "the next one", PATIENCE_S)
        prefill.valve.let(1)
        assert (await author.committed("short")).token == answer(PROMPT[:4], 1)[0]
        spans = prefill.valve.spans
        num_before = next(index for index, (key, _, _) in enumerate(spans) if key.request == "short")
        assert sum(length for _, _, length in spans[:num_before]) <= 2 * CHUNK_SIZE  # one step
        assert not prefill.valve.computed("long-8")
        assert not prefill.valve.computed("long-9")
        num_chunks = MAX_RUNNING * 15 - sum(length for _, _, length in spans[:num_before]) // CHUNK_SIZE
        assert prefill.edge.load.num_cancelled_chunks == pytest.approx(num_chunks, abs=2)

    async def test_a_task_that_is_deleted_while_it_is_queued_is_never_computed(
        self, fabric: Fabric, author: ScriptedAuthor
    ) -> None:
        entry = await author.publish("gone", PROMPT)
        await author.publish("r", PROMPT)
        await fabric.broker.tasks(FINGERPRINT).delete(entry)
        prefill = await fabric.prefill()
        await author.committed()
        assert [bind.binding.request for bind in author.binds] == ["r"]
        assert not prefill.valve.computed("gone")

    async def test_one_that_is_cancelled_between_claim_and_bind(self, fabric: Fabric, author: ScriptedAuthor) -> None:
        author.verdicts["bind"] = pb.VERDICT_CANCELLED
        author.is_answering.clear()
        prefill = await fabric.prefill()
        await author.publish("gone", PROMPT)
        await until(lambda: author.binds, "it is claimed", PATIENCE_S)
        author.is_answering.set()
        await until(
            lambda: prefill.worker._intake.is_at_rest or prefill.worker._intake._is_claiming,
            "it is answered",
            PATIENCE_S,
        )
        author.verdicts["bind"] = pb.VERDICT_GO
        await author.publish("r", PROMPT)
        await author.committed()
        assert not prefill.valve.computed("gone")
        assert prefill.edge.load.num_cancelled_chunks == 0


class TestPoison:
    async def test_a_task_whose_worker_died_is_bound_by_nobody_else(
        self, fabric: Fabric, author: ScriptedAuthor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its author publishes the next try: a task is delivered to one worker, whatever has become of that."""
        monkeypatch.setattr(prefill_worker.intake, "ORPHAN_IDLE_S", 0.03)
        first = await fabric.prefill()
        first.valve.close()
        await author.publish("poison", PROMPT)
        await until(lambda: first.valve.is_holding, "it is being computed", PATIENCE_S)
        await first.kill()
        second = await fabric.prefill("prefill-1")
        sweeps = counting(second.worker._intake._tasks, "abandoned", monkeypatch)
        await until(lambda: len(sweeps) > 3, "the second worker has looked at it", PATIENCE_S)
        assert [bind.worker for bind in author.binds] == [first.record.worker]
        assert not second.valve.computed("poison")
        await author.publish("poison", PROMPT, try_number=2)
        await author.committed("poison")
        assert [bind.binding.try_number for bind in author.binds] == [1, 2]


async def test_the_heartbeat_counts_bindings_and_tries(fabric: Fabric, author: ScriptedAuthor) -> None:
    prefill = await fabric.prefill()
    await author.publish("r", PROMPT)
    await author.committed()
    assert await author.renew(prefill.record, "r", "unheard of") == ["unheard of"]

    async def is_told(num_bindings: int) -> bool:
        state = await state_of(fabric, prefill)
        assert state is not None
        load = msgspec.structs.asdict(state.load)
        return (load["num_bindings"], load["num_tries"], load["num_stale"]) == (num_bindings, 1, 1)

    await until(lambda: is_told(1), "it holds one", PATIENCE_S)
    await author.release(prefill.record, "r")
    await until(lambda: is_told(0), "it holds none", PATIENCE_S)
