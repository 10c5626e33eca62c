"""Prefill workers lost over a request: which losses are told, and that the request is then computed beside nobody."""

import logging
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

import decode_worker.receiver
from common.errors import PeerUnreachable
from common.messages.ids import Epoch
from common.messages.job import PrefillTask
from common.messages.registry import WorkerHealth, WorkerLoad
from decode_worker.worker import DecodeWorker
from proto import worker_pb2 as pb
from tests.support.feed_client import Answer, FeedClient, make_job
from tests.support.polling import until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.tagged_pages import BLOCK_SIZE, TAG_BYTES, answer
from tests.support.worker_fabric import SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(500, 522))
OTHER = list(range(600, 622))
TOKENS = answer(PROMPT, 5)
LONG_LEASE_S = 600.0


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def prefill(fabric: Fabric) -> AsyncIterator[ScriptedPrefill]:
    """A prefill worker that does nothing by itself."""
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    yield prefill
    await prefill.stop()


async def start(fabric: Fabric, prefill: ScriptedPrefill, **options: Any) -> tuple[Node[DecodeWorker], FeedClient]:
    """Start a decode worker that knows the prefill worker, and a gateway of it."""
    decode = await fabric.decode(**options)
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    return decode, await fabric.client(decode.record)


async def bound(decode: Node[DecodeWorker], prefill: ScriptedPrefill) -> PrefillTask:
    """Claim the next task and bind it."""
    task = (await prefill.claim()).task
    assert (await prefill.bind(decode.record, binding_of(task))).verdict == pb.VERDICT_GO
    return task


async def serve(decode: Node[DecodeWorker], prefill: ScriptedPrefill, prompt: list[int], first_page: int = 0) -> None:
    """Prefill what is asked for next as it should be."""
    task = await bound(decode, prefill)
    await prefill.announce(decode.record, binding_of(task), prefill.compute(prompt, first_page))
    await prefill.commit(decode.record, binding_of(task), answer(prompt, 1)[0])


def losses(client: FeedClient, request: str = "r") -> list[str]:
    """Return the reasons of the tries that its gateway was told of."""
    return [event.try_lost.reason for event in client.events[request, 1] if event.WhichOneof("event") == "try_lost"]


async def load(fabric: Fabric, decode: Node[DecodeWorker]) -> WorkerLoad:
    """Return what the registry knows of the decode worker."""
    states = await fabric.broker.registry.workers()
    return next(state.load for state in states if state.record == decode.record)


async def test_a_request_that_has_lost_its_prefill_workers_runs_beside_nobody(
    fabric: Fabric, prefill: ScriptedPrefill
) -> None:
    decode, client = await start(fabric, prefill)
    decode.valve.close()
    await client.place(make_job("other", OTHER, max_tokens=60), decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    await serve(decode, prefill, OTHER)
    await until(lambda: decode.valve.is_holding, "the other one decodes")
    for _ in range(2):
        task = await bound(decode, prefill)
        await prefill.commit(decode.record, binding_of(task), failure="invalid_logits")
    await until(lambda: losses(client) == ["failed", "failed"], "its gateway knows of both")

    def is_exclusive() -> bool:
        if decode.valve.is_holding:
            decode.valve.let(1)
        return decode.edge.load.is_exclusive

    await until(is_exclusive, "it waits for its turn")

    async def is_closed() -> bool:
        return not (await load(fabric, decode)).is_open

    await until(is_closed, "nobody else is placed here")
    decode.valve.open()
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert (await client.answer("other")).tokens == answer(OTHER, 60)
    order = [key.request for key, _, _ in decode.valve.spans]
    assert order == sorted(order), "the other one first, then the suspect"  # "other" < "r"
    await fabric.until_idle()
    assert not decode.edge.load.is_exclusive


async def test_a_suspect_is_not_shared_with_a_prefill_worker(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    decode, client = await start(fabric, prefill)
    decode.valve.close()
    await client.place(msgspec.structs.replace(make_job("r", PROMPT), runs_alone=True), decode.record)
    await until(lambda: decode.valve.is_holding, "it is computed here")
    assert await fabric.num_tasks() == 0

    async def is_closed() -> bool:
        return not (await load(fabric, decode)).is_open

    decode.valve.let(1)
    await until(is_closed, "nobody else is placed here")
    await client.place(make_job("next", OTHER), decode.record)  # waits for a worker that takes new work
    decode.valve.open()
    assert await client.answer("r") == Answer(TOKENS, "length")
    await serve(decode, prefill, OTHER)
    assert (await client.answer("next")).tokens == answer(OTHER, 5)
    await fabric.until_idle()


async def test_whoever_waits_beside_a_suspect_is_given_back(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    """It must not be there when the suspect ends the process: those that run go on, the suspect waits for them."""
    decode, client = await start(fabric, prefill)
    decode.valve.close()
    await client.place(make_job("running", OTHER, max_tokens=60), decode.record)
    await serve(decode, prefill, OTHER)
    await until(lambda: decode.valve.is_holding, "one decodes")
    await client.place(make_job("received", PROMPT), decode.record)
    await client.place(make_job("awaited", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("awaited") == ["accepted"], "its prompt is awaited")
    decode.valve.let(2)
    await bound(decode, prefill)
    await client.place(msgspec.structs.replace(make_job("suspect", PROMPT), runs_alone=True), decode.record)
    await client.place(msgspec.structs.replace(make_job("second", PROMPT), runs_alone=True), decode.record)
    await client.place(make_job("late", PROMPT), decode.record)
    await until(lambda: client.kinds("suspect") == ["accepted"], "the suspect is here")
    assert await client.send_prompt(decode.record, "awaited", PROMPT)
    decode.valve.let(1)
    for request in ("received", "awaited", "second", "late"):
        assert (await client.answer(request)).reason == "displaced"
    decode.valve.open()
    assert (await client.answer("running")).tokens == answer(OTHER, 60)
    assert await client.answer("suspect") == Answer(TOKENS, "length")
    await fabric.until_idle()


async def test_deaths_of_earlier_placements_and_lost_tries_add_up(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    decode, client = await start(fabric, prefill)
    await client.place(msgspec.structs.replace(make_job("r", PROMPT), num_deaths=1), decode.record)
    task = await bound(decode, prefill)
    await prefill.commit(decode.record, binding_of(task), failure="invalid_logits")
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert decode.edge.tallies().num_tries == 1, "there is no second try"
    await fabric.until_idle()


async def test_a_suspect_that_waits_for_its_turn_is_cancelled(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    decode, client = await start(fabric, prefill)
    decode.valve.close()
    await client.place(make_job("other", OTHER, max_tokens=60), decode.record)
    await serve(decode, prefill, OTHER)
    await until(lambda: decode.valve.is_holding, "the other one decodes")
    await client.place(msgspec.structs.replace(make_job("r", PROMPT), runs_alone=True), decode.record)
    await until(lambda: client.kinds("r") == ["accepted"], "it is here")
    decode.valve.let(2)
    await until(lambda: decode.edge.load.is_exclusive, "it waits for its turn")
    await client.cancel(decode.record, "r")
    decode.valve.open()
    await until(lambda: not decode.edge.load.is_exclusive, "others are welcome again")
    assert (await client.answer("other")).tokens == answer(OTHER, 60)
    assert not decode.valve.computed("r")
    await fabric.until_idle()


async def test_nobody_waits_for_a_prefill_worker_that_is_registered_and_unreachable(
    fabric: Fabric, prefill: ScriptedPrefill
) -> None:
    """Its link to Redis is well, the one to us is not: after it was silent for one request, others do without it."""
    decode, client = await start(fabric, prefill, lease_s=0.6)
    await client.place(make_job("r", PROMPT), decode.record)
    await bound(decode, prefill)
    prefill.is_answering.clear()
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert losses(client) == ["silent"]
    assert decode.edge.tallies().num_tries == 1
    await client.place(make_job("next", OTHER), decode.record)
    assert (await client.answer("next")).tokens == answer(OTHER, 5)
    assert decode.edge.tallies().num_tries == 1
    await fabric.until_idle()


async def _frozen(prefill: ScriptedPrefill) -> None:
    prefill.is_answering.clear()


async def _stalled(prefill: ScriptedPrefill) -> None:
    prefill.is_stalled = True


async def _unreachable(prefill: ScriptedPrefill) -> None:
    await prefill.stop_listening()


@pytest.mark.parametrize(("way", "loss"), [(_frozen, "silent"), (_stalled, "stalled"), (_unreachable, "died")])
async def test_a_lost_prefill_worker_is_told(
    fabric: Fabric, prefill: ScriptedPrefill, way: Callable[[ScriptedPrefill], object], loss: str
) -> None:
    decode, client = await start(fabric, prefill, lease_s=1.0)
    await client.place(make_job("r", PROMPT), decode.record)
    await bound(decode, prefill)
    await way(prefill)  # type: ignore[misc]  # each is awaitable
    await until(lambda: losses(client) == [loss], "its gateway knows")
    await fabric.broker.registry.leave(prefill.record.worker, prefill.record.epoch)
    prefill.is_answering.set()
    assert await client.answer("r") == Answer(TOKENS, "length")
    await fabric.until_idle()


async def test_b048_a_restart_in_the_same_seat_is_noticed_long_before_the_lease_ends(
    fabric: Fabric, prefill: ScriptedPrefill
) -> None:
    decode, client = await start(fabric, prefill, lease_s=LONG_LEASE_S)
    for name, prompt in (("r", PROMPT), ("other", OTHER)):
        await client.place(make_job(name, prompt), decode.record)
    first, second = await bound(decode, prefill), await bound(decode, prefill)
    again = msgspec.structs.replace(prefill.record, epoch=Epoch(prefill.record.epoch + 1))
    pages = prefill.compute(PROMPT)
    puller(decode).error = PeerUnreachable("gone")
    await prefill.announce(decode.record, binding_of(first), pages)
    await prefill.stop_listening()
    await fabric.broker.registry.beat(again, WorkerLoad(health=WorkerHealth.LOADING))
    await until(lambda: decode.edge.peers.find(again.worker, again.epoch), "the restart is known")
    decode.worker._probe()  # as the next pull that fails does
    for task in (first, second):
        await until(lambda task=task: losses(client, task.request) == ["died"], f"{task.request} is not waited for")
        assert (await client.answer(task.request)).reason == "length"
    await fabric.until_idle()


async def test_a_pull_that_fails_puts_its_source_in_doubt(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    decode, client = await start(fabric, prefill, lease_s=LONG_LEASE_S)
    await client.place(make_job("r", PROMPT), decode.record)
    await client.place(make_job("other", OTHER), decode.record)
    first, second = await bound(decode, prefill), await bound(decode, prefill)
    puller(decode).error = PeerUnreachable("gone")
    await prefill.announce(decode.record, binding_of(first), prefill.compute(PROMPT))
    await until(lambda: prefill.num_renewals, "it is asked at once")
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert not losses(client), "it answers: that its pages are out of reach is not the request's doing"
    puller(decode).error = None
    await prefill.announce(decode.record, binding_of(second), prefill.compute(OTHER))
    await prefill.commit(decode.record, binding_of(second), answer(OTHER, 1)[0])
    assert (await client.answer("other")).tokens == answer(OTHER, 5)
    await fabric.until_idle()


async def test_what_is_not_the_requests_doing_is_not_told(
    fabric: Fabric, prefill: ScriptedPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that was reused, a prompt that does not fit, a task that nobody binds, a binding that is not held."""
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 0.05)
    decode, client = await start(fabric, prefill, lease_s=1.0)

    async def miss(task: PrefillTask, prompt: list[int]) -> None:
        pages = prefill.compute(prompt)
        prefill.reuse(pages[:1])
        await prefill.announce(decode.record, binding_of(task), pages)

    async def refuse(task: PrefillTask, prompt: list[int]) -> None:
        await prefill.commit(decode.record, binding_of(task), failure="22 tokens do not fit")

    async def drop(task: PrefillTask, prompt: list[int]) -> None:
        prefill.holds = False

    for number, way in enumerate((miss, refuse, drop)):
        name, prompt = str(number), [number, *PROMPT]
        await client.place(make_job(name, prompt), decode.record)
        await way(await bound(decode, prefill), prompt)
        assert (await client.answer(name)).tokens == answer(prompt, 5)  # nobody binds its second try
        assert losses(client, name) == []
        assert decode.valve.computed(name)[0] == (0, 8)
    await fabric.until_idle()


async def test_verify_pages_corrupt_bytes_lose_the_try(
    fabric: Fabric, prefill: ScriptedPrefill, caplog: pytest.LogCaptureFixture
) -> None:
    decode, client = await start(fabric, prefill)
    await client.place(make_job("r", PROMPT), decode.record)
    first = await bound(decode, prefill)
    with caplog.at_level(logging.ERROR):
        await prefill.announce(decode.record, binding_of(first), checked(prefill, PROMPT, 0, wrong=3))
        await until(lambda: losses(client) == ["corrupt"], "its gateway knows")
    (line,) = [record for record in caplog.records if "checksum" in record.getMessage()]
    assert line.__dict__["request_id"] == "r"
    assert decode.edge.metrics.registry.get_sample_value("tandem_corrupt_pages_total") == 1
    second = await bound(decode, prefill)
    await prefill.announce(decode.record, binding_of(second), checked(prefill, PROMPT, 10))
    await prefill.commit(decode.record, binding_of(second), TOKENS[0])
    assert await client.answer("r") == Answer(TOKENS, "length")
    await fabric.until_idle()


async def test_what_is_counted_reaches_the_registry(fabric: Fabric, prefill: ScriptedPrefill) -> None:
    decode, client = await start(fabric, prefill)
    await client.place(make_job("r", PROMPT), decode.record)
    task = await bound(decode, prefill)

    async def shows(**counts: int) -> bool:
        decode.edge.touch()
        found = await load(fabric, decode)
        return {name: getattr(found, name) for name in counts} == counts

    await until(lambda: shows(num_bindings=1, num_placements=1, num_failovers=0, num_tries=1, num_stale=0), "bound")
    transfer = puller(decode)
    transfer.gate.clear()
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT))
    await until(lambda: transfer.num_running, "a copy runs")
    await client.cancel(decode.record, "r")
    assert await prefill.commit(decode.record, binding_of(task), TOKENS[0]) == pb.VERDICT_CANCELLED
    try:
        await until(lambda: shows(num_bindings=0, num_quarantined=6, num_stale=1), "its pages are in quarantine")
    finally:
        transfer.gate.set()
    await until(lambda: shows(num_quarantined=0), "they are free")
    await client.place(make_job("r", PROMPT, placement=2), decode.record)
    await serve(decode, prefill, PROMPT)
    assert (await client.answer("r", 2)).tokens == TOKENS
    await until(lambda: shows(num_placements=2, num_failovers=1, num_tries=2), "the failover is counted")
    await fabric.until_idle()


def checked(prefill: ScriptedPrefill, prompt: list[int], first_page: int, wrong: int | None = None) -> list[pb.PageRef]:
    """Return references with checksums; that of page `wrong` is another one."""
    pages = prefill.compute(prompt, first_page)
    for page in pages:
        start = page.page * BLOCK_SIZE * TAG_BYTES
        page.checksum = zlib.crc32(prefill.pages[start : start + BLOCK_SIZE * TAG_BYTES])
    if wrong is not None:
        pages[wrong].checksum ^= 1
    return pages
