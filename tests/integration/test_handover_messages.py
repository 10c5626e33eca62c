"""Bind, announce and commit come late, twice, out of order, from the wrong sender: none of it reaches a client.

The prefill worker is scripted, so that each message is exactly what a test says.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from common.messages.job import PrefillTask
from decode_worker.worker import DecodeWorker
from proto import worker_pb2 as pb
from tests.support.feed_client import Answer, FeedClient, make_job
from tests.support.polling import until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.tagged_pages import VOCABULARY, answer
from tests.support.worker_fabric import SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(300, 322))
NUM_BLOCKS = 6
TOKEN = answer(PROMPT, 1)[0]

GO, STALE, CANCELLED = pb.VERDICT_GO, pb.VERDICT_STALE, pb.VERDICT_CANCELLED


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def prefill(fabric: Fabric) -> AsyncIterator[ScriptedPrefill]:
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    yield prefill
    await prefill.stop()


@pytest.fixture
async def decode(fabric: Fabric, prefill: ScriptedPrefill) -> Node[DecodeWorker]:
    decode = await fabric.decode()
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    return decode


@pytest.fixture
async def client(fabric: Fabric, decode: Node[DecodeWorker]) -> AsyncIterator[FeedClient]:
    yield await fabric.client(decode.record)
    await fabric.until_idle()


@pytest.fixture
async def task(client: FeedClient, decode: Node[DecodeWorker], prefill: ScriptedPrefill) -> PrefillTask:
    """The first try of request "r", claimed but not bound."""
    await client.place(make_job("r", PROMPT), decode.record)
    return (await prefill.claim()).task


async def finish(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask, first_page: int = 0
) -> None:
    """Do what is left of a bound task, and see the right answer."""
    pages = prefill.compute(PROMPT, first_page)
    assert await prefill.announce(decode.record, binding_of(task), pages) == GO
    assert await prefill.commit(decode.record, binding_of(task), TOKEN) == GO
    assert await client.answer("r") == Answer(answer(PROMPT, 5), "length")
    await until(lambda: ("r", 1, task.try_number) in prefill.released, "the binding is released")


async def test_the_ordinary_way(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    reply = await prefill.bind(decode.record, binding_of(task))
    assert (reply.verdict, reply.first_block, reply.num_blocks) == (GO, 0, NUM_BLOCKS)
    assert reply.lease_s > 0
    await finish(decode, prefill, client, task)


async def test_a_bind_that_is_repeated_changes_nothing(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    replies = [await prefill.bind(decode.record, binding_of(task)) for _ in range(3)]
    assert replies[0] == replies[1] == replies[2]
    await finish(decode, prefill, client, task)


async def test_b054_chunks_that_come_twice_and_out_of_order(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    pages = prefill.compute(PROMPT)
    assert await prefill.commit(decode.record, binding_of(task), TOKEN) == GO  # done, before the last chunk
    assert await prefill.commit(decode.record, binding_of(task), TOKEN + 1) == GO  # the first one counts
    for part in (pages[4:], pages[2:4], pages[4:], pages[2:3]):
        assert await prefill.announce(decode.record, binding_of(task), part) == GO
    assert client.kinds("r") == ["accepted"]
    await prefill.announce(decode.record, binding_of(task), pages[:2])
    assert await client.answer("r") == Answer(answer(PROMPT, 5), "length")
    assert sorted(copy.source for copy in puller(decode).copied) == list(range(NUM_BLOCKS))  # each page once


async def test_b054_a_page_that_is_announced_twice_is_pulled_once(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    # A second copy of a page could outlive the hand-over, and bring what its owner has written there since.
    await prefill.bind(decode.record, binding_of(task))
    pages = prefill.compute(PROMPT)
    puller(decode).gate.clear()
    for _ in range(2):
        await prefill.announce(decode.record, binding_of(task), pages)
    puller(decode).gate.set()
    await prefill.commit(decode.record, binding_of(task), TOKEN)
    assert (await client.answer("r")).tokens == answer(PROMPT, 5)
    assert len(puller(decode).copied) == NUM_BLOCKS


async def test_what_comes_after_the_end_is_answered_and_ignored(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    await finish(decode, prefill, client, task)
    pages = prefill.compute([0] * len(PROMPT))
    num_copied = len(puller(decode).copied)
    assert (await prefill.bind(decode.record, binding_of(task))).verdict == CANCELLED
    assert await prefill.announce(decode.record, binding_of(task), pages) == CANCELLED
    assert await prefill.commit(decode.record, binding_of(task), TOKEN) == CANCELLED
    assert len(puller(decode).copied) == num_copied


@pytest.mark.parametrize("other", [{"placement": 2}, {"placement": 0}])
async def test_messages_of_another_placement(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask, other: dict[str, int]
) -> None:
    outdated = binding_of(task, **other)
    assert (await prefill.bind(decode.record, outdated)).verdict == CANCELLED
    await prefill.bind(decode.record, binding_of(task))
    assert await prefill.announce(decode.record, outdated, prefill.compute([0] * 22)) == CANCELLED
    assert await prefill.commit(decode.record, outdated, TOKEN + 1) == CANCELLED
    await finish(decode, prefill, client, task)


async def test_b054_messages_of_another_try(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    pages = prefill.compute(PROMPT)
    await prefill.announce(decode.record, binding_of(task), pages[:3])
    await prefill.commit(decode.record, binding_of(task), failure="nan")
    second = (await prefill.claim()).task
    assert (second.request, second.placement, second.try_number) == ("r", 1, 2)
    await until(lambda: ("r", 1, 1) in prefill.released, "the first try is released")
    await prefill.bind(decode.record, binding_of(second))
    # The first try goes on as if nothing had happened.
    assert (await prefill.bind(decode.record, binding_of(task))).verdict == STALE
    assert await prefill.announce(decode.record, binding_of(task), pages[3:]) == STALE
    assert await prefill.commit(decode.record, binding_of(task), TOKEN + 1) == STALE
    assert await prefill.announce(decode.record, binding_of(task, try_number=3), pages) == STALE
    await finish(decode, prefill, client, second, first_page=10)


async def test_messages_before_the_bind(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    assert await prefill.announce(decode.record, binding_of(task), prefill.compute([0] * 22)) == STALE
    assert await prefill.commit(decode.record, binding_of(task), TOKEN + 1) == STALE
    await prefill.bind(decode.record, binding_of(task))
    await finish(decode, prefill, client, task)


async def test_messages_of_another_incarnation(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    before = prefill.record.epoch - 1
    assert await prefill.announce(decode.record, binding_of(task), prefill.compute([0] * 22), before) == STALE
    assert await prefill.commit(decode.record, binding_of(task), TOKEN + 1, epoch=before) == STALE
    await finish(decode, prefill, client, task)


async def test_the_first_to_bind_has_it(
    fabric: Fabric, decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    late = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET, "prefill-y")
    await late.start()
    assert (await prefill.bind(decode.record, binding_of(task))).verdict == GO
    assert (await late.bind(decode.record, binding_of(task))).verdict == STALE
    await finish(decode, prefill, client, task)
    await late.stop()


async def test_a_worker_that_is_not_registered_cannot_bind(
    fabric: Fabric, decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    stranger = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET, "prefill-y")
    await stranger.start()
    await fabric.broker.registry.leave(stranger.record.worker, stranger.record.epoch)
    assert (await stranger.bind(decode.record, binding_of(task))).verdict == STALE
    await stranger.stop()
    await prefill.bind(decode.record, binding_of(task))
    await finish(decode, prefill, client, task)


async def test_b043_another_fingerprint_is_refused_in_words(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="fingerprint") as caught:
        await prefill.bind(decode.record, binding_of(task), fingerprint="0ther")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await prefill.bind(decode.record, binding_of(task))
    await finish(decode, prefill, client, task)


async def test_b039_pages_that_were_given_away_meanwhile(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    pages = prefill.compute(PROMPT)
    prefill.reuse(pages[2:3])
    await prefill.announce(decode.record, binding_of(task), pages)
    await prefill.commit(decode.record, binding_of(task), TOKEN)  # whatever its answer: the try is lost
    second = (await prefill.claim()).task
    assert second.try_number == 2
    await prefill.bind(decode.record, binding_of(second))
    await finish(decode, prefill, client, second, first_page=10)


async def test_b042_a_commit_without_all_pages_starts_nothing(
    fabric: Fabric, decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT)[:-1])
    await prefill.commit(decode.record, binding_of(task), TOKEN)
    await until(lambda: len(puller(decode).copied) == NUM_BLOCKS - 1, "all but one page is here")
    assert not decode.valve.spans
    await fabric.broker.registry.leave(prefill.record.worker, prefill.record.epoch)
    prefill.holds = False
    await decode.worker._leases.renew()  # nobody holds the missing page: the prompt is computed here
    assert await client.answer("r") == Answer(answer(PROMPT, 5), "length")


async def test_pages_that_nobody_wants_are_not_pulled(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    surplus = [pb.PageRef(block_index=index, page=0, generation=0) for index in (NUM_BLOCKS, 1 << 31, (1 << 32) - 1)]
    assert await prefill.announce(decode.record, binding_of(task), surplus) == GO
    assert not puller(decode).num_running
    await finish(decode, prefill, client, task)


async def test_a_page_outside_of_the_pool_loses_the_try_only(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    await prefill.announce(decode.record, binding_of(task), [pb.PageRef(block_index=0, page=1 << 31, generation=0)])
    second = (await prefill.claim()).task
    await prefill.bind(decode.record, binding_of(second))
    await finish(decode, prefill, client, second)


async def test_a_pull_that_fails_in_an_unknown_way_loses_the_try_only(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient, task: PrefillTask
) -> None:
    puller(decode).error = ZeroDivisionError()
    await prefill.bind(decode.record, binding_of(task))
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT))
    second = (await prefill.claim()).task
    puller(decode).error = None
    await prefill.bind(decode.record, binding_of(second))
    await finish(decode, prefill, client, second)


FOREIGN = pb.TokenLogprobs(logprob=-1.0, top_ids=[5, VOCABULARY], top_logprobs=[-1.0, -2.0])


@pytest.mark.parametrize(
    "nonsense",
    [
        {"token": VOCABULARY},
        {"token": (1 << 32) - 1},
        {"token": TOKEN, "logprobs": FOREIGN},
    ],
    ids=["just behind", "far behind", "logprobs"],
)
async def test_a_commit_of_no_token_of_the_model_loses_the_try_only(
    decode: Node[DecodeWorker],
    prefill: ScriptedPrefill,
    client: FeedClient,
    task: PrefillTask,
    caplog: pytest.LogCaptureFixture,
    nonsense: dict[str, Any],
) -> None:
    await prefill.bind(decode.record, binding_of(task))
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT))
    await prefill.commit(decode.record, binding_of(task), **nonsense)
    second = (await prefill.claim()).task
    assert (second.request, second.try_number) == ("r", 2)
    assert "is outside the vocabulary of 997" in caplog.text
    await prefill.bind(decode.record, binding_of(second))
    await finish(decode, prefill, client, second, first_page=10)
    assert not decode.task.done()


async def test_a_commit_with_foreign_tokens_in_the_logprobs_of_the_prompt_loses_the_try_only(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient
) -> None:
    await client.place(make_job("r", PROMPT, num_prompt_logprobs=1), decode.record)
    task = (await prefill.claim()).task
    await prefill.bind(decode.record, binding_of(task))
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT))
    sound = pb.TokenLogprobs(logprob=-1.0, top_ids=[VOCABULARY - 1], top_logprobs=[-1.0])
    told = [sound] * (len(PROMPT) - 2)
    await prefill.commit(decode.record, binding_of(task), TOKEN, prompt_logprobs=[*told, FOREIGN])
    second = (await prefill.claim()).task
    assert second.try_number == 2
    await prefill.bind(decode.record, binding_of(second))
    await prefill.announce(decode.record, binding_of(second), prefill.compute(PROMPT, 10))
    await prefill.commit(decode.record, binding_of(second), TOKEN, prompt_logprobs=[*told, sound])
    assert await client.answer("r") == Answer(answer(PROMPT, 5), "length")


async def test_a_stop_token_needs_no_pages(
    decode: Node[DecodeWorker], prefill: ScriptedPrefill, client: FeedClient
) -> None:
    await client.place(make_job("r", PROMPT, stop_ids=(TOKEN,)), decode.record)
    task = (await prefill.claim()).task
    await prefill.bind(decode.record, binding_of(task))
    puller(decode).gate.clear()
    await prefill.announce(decode.record, binding_of(task), prefill.compute(PROMPT)[:2])
    await until(lambda: puller(decode).num_running, "a copy runs")
    assert await prefill.commit(decode.record, binding_of(task), TOKEN) == GO
    await until(lambda: ("r", 1, 1) in prefill.released, "nothing more is wanted")
    puller(decode).gate.set()
    assert await client.answer("r") == Answer([TOKEN], "stop")
    assert not decode.valve.spans
