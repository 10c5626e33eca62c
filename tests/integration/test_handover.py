"""Prompts prefilled by another worker: the tokens are those of a local prefill, and only what is missing is moved.

Wrong pages would be wrong tokens: see `tests/support/tagged_pages.py`.
"""

from collections.abc import AsyncIterator
from functools import partial

import pytest

from common.transfer.protocols import PageCopy
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.support.feed_client import Answer, FeedClient, make_job
from tests.support.polling import until
from tests.support.tagged_pages import BLOCK_SIZE, answer
from tests.support.worker_fabric import Fabric, Node, puller, running_fabric

PROMPT = list(range(100, 130))
NUM_BLOCKS = 8
"""Of `PROMPT`; the last one is not full."""

Pair = tuple[Node[DecodeWorker], Node[PrefillWorker], FeedClient]


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def pair(fabric: Fabric) -> AsyncIterator[Pair]:
    pair = await fabric.pair()
    yield pair
    await fabric.until_idle()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 30, 64])
async def test_a_remote_prefill_gives_the_tokens_of_a_local_one(pair: Pair, num_tokens: int) -> None:
    decode, prefill, client = pair
    prompt = list(range(7, 7 + num_tokens))
    await client.place(make_job("r", prompt), decode.record)
    assert await client.answer("r") == Answer(answer(prompt, 5), "length")
    assert sum(length for _, length in prefill.valve.computed("r")) == num_tokens
    assert all(start >= num_tokens for start, _ in decode.valve.computed("r"))
    assert client.early_tokens("r") == answer(prompt, 1)


async def test_pages_are_moved_while_the_next_chunk_computes(pair: Pair) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    copied = puller(decode).copied
    for _ in range(3):
        num_copied = len(copied)
        await until(lambda: prefill.valve.is_holding, "the next chunk is about to be computed")
        prefill.valve.let(1)
        await until(partial(_has, copied, num_copied + 2), "both pages of that chunk are pulled")
    assert not client.early_tokens("r")
    prefill.valve.open()
    assert (await client.answer("r")).tokens == answer(PROMPT, 5)


def _has(items: list[PageCopy], count: int) -> bool:
    return len(items) == count


async def test_many_prompts_at_once(pair: Pair) -> None:
    decode, _, client = pair
    prompts = {str(number): list(range(number, 3 * number + 20)) for number in range(16)}
    for name, prompt in prompts.items():
        await client.place(make_job(name, prompt), decode.record)
    for name, prompt in prompts.items():
        assert (await client.answer(name)).tokens == answer(prompt, 5)


async def test_blocks_that_the_decode_side_has_are_not_wanted(pair: Pair) -> None:
    decode, _, client = pair
    await client.place(make_job("first", PROMPT), decode.record)
    await client.answer("first")
    copied = puller(decode).copied
    del copied[:]
    longer = [*PROMPT[:20], 1, 2, 3, 4, 5]
    await client.place(make_job("second", longer), decode.record)
    assert (await client.answer("second")).tokens == answer(longer, 5)
    assert len(copied) == 2  # 25 tokens are 7 blocks, of which 5 are known


@pytest.mark.parametrize("num_tokens", [28, 29])
async def test_b053_a_prompt_that_is_cached_whole(pair: Pair, num_tokens: int) -> None:
    decode, prefill, client = pair
    prompt = PROMPT[:num_tokens]
    for name in ("first", "second"):
        await client.place(make_job(name, prompt), decode.record)
        got = await client.answer(name)
        assert got.tokens == answer(prompt, 5)
        assert got.num_cached == (0 if name == "first" else (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
    assert len(prefill.valve.computed("second")) == 1
    # The last token is always computed again, so its block is always wanted.
    assert len(puller(decode).copied) == -(-num_tokens // BLOCK_SIZE) + 1


async def test_b053_what_the_prefill_worker_had_cached_counts_and_what_was_moved_does_not(fabric: Fabric) -> None:
    decode, _, client = await fabric.pair()
    await client.place(make_job("first", PROMPT), decode.record)
    assert (await client.answer("first")).num_cached == 0
    other = await fabric.decode("decode-1")
    await fabric.know(other, *[node for node in fabric.nodes if isinstance(node.worker, PrefillWorker)])
    await client.follow(other.record)
    await client.place(make_job("second", PROMPT), other.record)
    assert await client.answer("second") == Answer(answer(PROMPT, 5), "length", 28)
    await fabric.until_idle()


async def test_b051_one_token_is_wanted(pair: Pair) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    await client.place(make_job("r", PROMPT, max_tokens=1), decode.record)
    await until(lambda: prefill.valve.is_holding, "the prompt is being computed")
    assert decode.edge.load.blocks_free == decode.edge.load.blocks_total  # no reservation for a single token
    prefill.valve.open()
    assert await client.answer("r") == Answer(answer(PROMPT, 1), "length")
    assert client.kinds("r") == ["accepted", "tokens", "finished"]
    assert not puller(decode).copied
    assert not decode.valve.spans


async def test_b051_the_first_token_is_a_stop_token(pair: Pair) -> None:
    decode, _, client = pair
    (first,) = answer(PROMPT, 1)
    puller(decode).gate.clear()  # nothing of what is pulled so far is needed any more
    await client.place(make_job("r", PROMPT, stop_ids=(first,)), decode.record)
    await until(lambda: client.early_tokens("r"), "the first token is sampled")
    puller(decode).gate.set()
    assert await client.answer("r") == Answer([first], "stop")
    assert not decode.valve.spans


async def test_shown_tokens_are_continued_and_not_sampled_again(pair: Pair) -> None:
    decode, _, client = pair
    whole = answer(PROMPT, 8)
    await client.place(make_job("r", PROMPT, shown=whole[:3], max_tokens=8, placement=2), decode.record)
    assert await client.answer("r", 2) == Answer(whole[3:], "length")
    assert client.early_tokens("r", 2) == whole[3:4]


async def test_two_prefill_workers_share_the_tasks(fabric: Fabric) -> None:
    decode, one, client = await fabric.pair()
    two = await fabric.prefill("prefill-1")
    await fabric.know(decode, one, two)
    one.valve.close()
    two.valve.close()
    for number in range(12):
        await client.place(make_job(str(number), [number, *PROMPT]), decode.record)
    await until(lambda: one.valve.is_holding and two.valve.is_holding, "both have work")
    one.valve.open()
    two.valve.open()
    for number in range(12):
        assert (await client.answer(str(number))).tokens == answer([number, *PROMPT], 5)
    await fabric.until_idle()
