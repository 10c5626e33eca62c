"""A request that goes away gives back everything on both sides, whatever stage it was in, and nothing it should not."""

from collections.abc import AsyncIterator

import pytest

from common.broker.protocols import QueuedJob
from common.messages.ids import EntryId
from decode_worker.ledger import Live
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.support.feed_client import FeedClient, make_job
from tests.support.polling import turns, until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import GRACE_S, SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(200, 230))
NUM_BLOCKS = 8

Pair = tuple[Node[DecodeWorker], Node[PrefillWorker], FeedClient]
Scripted = tuple[Node[DecodeWorker], ScriptedPrefill, FeedClient]


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def pair(fabric: Fabric) -> AsyncIterator[Pair]:
    pair = await fabric.pair()
    yield pair
    await fabric.until_idle()


@pytest.fixture
async def scripted(fabric: Fabric) -> AsyncIterator[Scripted]:
    """A decode worker with a prefill worker that does nothing by itself."""
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    yield decode, prefill, client
    await fabric.until_idle()
    await prefill.stop()


async def test_while_nobody_has_bound_it(fabric: Fabric, scripted: Scripted) -> None:
    decode, _, client = scripted
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: decode.edge.load.num_reserved, "reserved")
    assert decode.edge.load.blocks_total - decode.edge.load.blocks_free == NUM_BLOCKS
    await client.cancel(decode.record, "r")
    await fabric.until_idle()


async def test_in_the_moment_in_which_its_pages_are_reserved(
    scripted: Scripted, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, _, client = scripted
    receiver = decode.worker._receiver
    begin = receiver.begin

    def begin_and_cancel(live: Live, *arguments: object) -> None:
        begin(live, *arguments)  # type: ignore[arg-type]  # passed on
        decode.worker._intake.cancel(live.job.request, live.job.placement)  # its task has not run yet

    monkeypatch.setattr(receiver, "begin", begin_and_cancel)
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: decode.edge.load.absorbed is not None, "the job has arrived")
    await fabric.until_idle()


async def test_b049_while_it_is_computed(pair: Pair, fabric: Fabric) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: prefill.valve.is_holding, "the first chunk is about to be computed")
    prefill.valve.let(1)
    await until(lambda: prefill.valve.computed("r") and prefill.valve.is_holding, "so is the second one")
    await client.cancel(decode.record, "r")
    await until(lambda: not len(prefill.worker._holdings), "the prefill worker knows")
    prefill.valve.let(1)  # the chunk that had begun
    await fabric.until_idle()
    assert prefill.valve.computed("r") == [(0, 8), (8, 8)]
    assert not client.early_tokens("r")


async def test_b049_abandoned_prompts_do_not_hold_up_the_next_one(pair: Pair) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    for number in range(6):
        await client.place(make_job(f"long {number}", range(number, number + 100)), decode.record)
    await until(lambda: prefill.valve.is_holding, "the first chunks are about to be computed")
    for number in range(6):
        await client.cancel(decode.record, f"long {number}")
    await until(lambda: not len(prefill.worker._holdings), "the prefill worker knows")
    await client.place(make_job("short", [1, 2, 3]), decode.record)
    await until(lambda: len(prefill.worker._holdings), "the short one is there")
    prefill.valve.open()
    assert (await client.answer("short")).tokens == answer([1, 2, 3], 5)
    num_chunks = len([key for key, _, _ in prefill.valve.spans if key.request != "short"])
    assert num_chunks <= 2, "only the step that had begun"


@pytest.mark.parametrize("is_committed", [False, True])
async def test_b038_while_its_pages_are_pulled(pair: Pair, fabric: Fabric, is_committed: bool) -> None:
    decode, prefill, client = pair
    transfer = puller(decode)
    transfer.gate.clear()
    if not is_committed:
        prefill.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    if is_committed:
        await until(lambda: client.early_tokens("r"), "its first token is sampled")
    else:
        await until(lambda: prefill.valve.is_holding, "the first chunk is about to be computed")
        prefill.valve.let(1)
    await until(lambda: transfer.num_running, "a copy runs")
    await client.cancel(decode.record, "r")
    # The prefill worker hears of it at once, however long the copy takes.
    await until(lambda: not len(prefill.worker._holdings), "the prefill worker knows")
    assert await fabric.num_tasks() == 0
    prefill.valve.open()
    await until(lambda: not decode.edge.load.num_reserved, "the sequence is gone")
    # Its pages are not: something may still be written into them.
    assert decode.edge.load.blocks_total - decode.edge.load.blocks_free == NUM_BLOCKS
    transfer.gate.set()


async def test_b038_no_other_request_gets_a_page_into_which_a_copy_runs(fabric: Fabric) -> None:
    decode, prefill = await fabric.decode(num_blocks=NUM_BLOCKS + 2), await fabric.prefill()
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    transfer = puller(decode)
    for number in range(10):
        transfer.gate.clear()
        one, other = f"one {number}", f"other {number}"
        await client.place(make_job(one, [number, *PROMPT[1:]]), decode.record)
        await until(lambda: transfer.num_running, "a copy runs")
        await client.cancel(decode.record, one)
        await client.place(make_job(other, [500 + number, *PROMPT[1:]], max_tokens=2), decode.record)
        await until(lambda: decode.edge.load.num_waiting, "the next one waits for pages")
        transfer.gate.set()
        assert (await client.answer(other)).tokens == answer([500 + number, *PROMPT[1:]], 2)
    await fabric.until_idle()


async def test_while_it_decodes(pair: Pair) -> None:
    decode, _, client = pair
    decode.valve.close()
    await client.place(make_job("r", PROMPT, max_tokens=50), decode.record)
    await until(lambda: decode.valve.is_holding, "it decodes")
    await client.cancel(decode.record, "r")
    decode.valve.open()
    await until(lambda: decode.is_idle, "its pages are free")
    assert len(decode.valve.computed("r")) <= 1
    assert client.kinds("r")[-1] == "tokens"  # whoever cancels wants no answer


async def test_while_it_waits_for_pages(fabric: Fabric) -> None:
    decode = await fabric.decode(num_blocks=NUM_BLOCKS)
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_job("first", PROMPT, max_tokens=2), decode.record)
    await until(lambda: decode.valve.is_holding, "one has the pages")
    decode.worker._intake.accept(QueuedJob(EntryId("9-0"), make_job("second", PROMPT, max_tokens=2)))
    await until(lambda: client.kinds("second"), "the other one is accepted")
    await client.cancel(decode.record, "second")
    decode.valve.open()
    assert (await client.answer("first")).tokens == answer(PROMPT, 2)
    await fabric.until_idle()
    assert not decode.valve.computed("second")


async def test_before_the_job_arrives(pair: Pair, fabric: Fabric) -> None:
    decode, prefill, client = pair
    await client.cancel(decode.record, "r", 2)
    for placement in (1, 2):
        await client.place(make_job("r", PROMPT, placement=placement), decode.record)
    await client.place(make_job("r", PROMPT, placement=3), decode.record)  # not cancelled
    assert (await client.answer("r", 3)).tokens == answer(PROMPT, 5)
    assert not client.kinds("r", 1)
    assert not client.kinds("r", 2)
    await fabric.until_idle()
    assert {key.placement for key, _, _ in prefill.valve.spans} == {3}


async def test_b036_a_prefill_worker_that_never_says_done(scripted: Scripted, fabric: Fabric) -> None:
    decode, prefill, client = scripted
    for number in range(30):
        name = str(number)
        await client.place(make_job(name, [number, *PROMPT]), decode.record)
        task = (await prefill.claim()).task
        assert (await prefill.bind(decode.record, binding_of(task))).num_blocks == NUM_BLOCKS
        await client.cancel(decode.record, name)
        await fabric.until_idle()
    await until(lambda: len(prefill.released) == 30, "every binding is released")


async def test_a_gateway_that_hangs_up_loses_its_requests(pair: Pair, fabric: Fabric) -> None:
    decode, prefill, client = pair
    other = await fabric.client(decode.record, prefill.record, gateway="gateway-1")
    prefill.valve.close()
    await client.place(make_job("mine", PROMPT), decode.record)
    await other.place(make_job("other", PROMPT, gateway="gateway-1"), decode.record)
    await client.place(make_job("long", PROMPT, has_prompt=False), decode.record)
    await until(lambda: len(prefill.worker._holdings) == 2, "both are being computed")
    await until(lambda: client.kinds("long"), "one waits for its prompt")
    await client.hang_up()
    await until(lambda: len(prefill.worker._holdings) == 1, "one is not wanted any more", GRACE_S + 5)
    await until(lambda: len(decode.worker._ledger) == 1, "nothing else is left of it")
    prefill.valve.open()
    assert (await other.answer("other")).tokens == answer(PROMPT, 5)
    await turns()
    assert "tokens" not in client.kinds("mine")
