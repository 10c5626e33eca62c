"""Reports from the field about the hand-over, each as often as it took to show: aborted receptions, late writes, leases
that ended under a queue, pairs that do not fit.
"""

import logging
import random
from collections.abc import AsyncIterator

import pytest

from common.cache.layout import KVLayout
from common.model.config import ModelConfig, RopeConfig
from common.model.fingerprint import fingerprint
from decode_worker.worker import DecodeWorker
from proto import worker_pb2 as pb
from tests.support.feed_client import FeedClient, make_job
from tests.support.polling import turns, until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(600, 630))
NUM_BLOCKS = 8
LEASE_S = 0.3

Scripted = tuple[Node[DecodeWorker], ScriptedPrefill, FeedClient]


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def scripted(fabric: Fabric) -> AsyncIterator[Scripted]:
    """A decode worker with a prefill worker that does nothing by itself."""
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    decode = await fabric.decode(num_blocks=NUM_BLOCKS + 1)
    client = await fabric.client(decode.record)
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    yield decode, prefill, client
    await fabric.until_idle()
    await prefill.stop()


async def test_b036_two_hundred_aborted_receptions_cost_no_block(scripted: Scripted, fabric: Fabric) -> None:
    decode, prefill, client = scripted
    for number in range(200):
        name, prompt = str(number), [number, *PROMPT[1:]]
        await client.place(make_job(name, prompt), decode.record)
        task = (await prefill.claim()).task
        if number % 4:
            await prefill.bind(decode.record, binding_of(task))
        pages = prefill.compute(prompt)
        if number % 4 > 1:
            await prefill.announce(decode.record, binding_of(task), pages[:3])
        await client.cancel(decode.record, name)  # its completion never comes
        await fabric.until_idle()
        # What comes after the blocks were reclaimed is answered and changes nothing.
        if number % 4 == 3:
            assert await prefill.announce(decode.record, binding_of(task), pages) == pb.VERDICT_CANCELLED
            assert await prefill.commit(decode.record, binding_of(task), 1) == pb.VERDICT_CANCELLED
            assert decode.is_idle
    assert not decode.worker._receiver._running


async def test_b038_fifty_aborts_at_random_moments_change_no_other_answer(fabric: Fabric) -> None:
    dice = random.Random(38)
    decode, prefill = await fabric.decode(num_blocks=NUM_BLOCKS + 3), await fabric.prefill(num_blocks=NUM_BLOCKS + 3)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    gate = puller(decode).gate
    for number in range(50):
        one, other = [number, *PROMPT[1:]], [100 + number, *PROMPT[1:]]
        gate.clear()
        await client.place(make_job(f"one {number}", one), decode.record)
        await turns(dice.randrange(200))
        await client.cancel(decode.record, f"one {number}")
        await client.place(make_job(f"other {number}", other, max_tokens=3), decode.record)
        await turns(dice.randrange(200))
        gate.set()
        assert (await client.answer(f"other {number}", deadline_s=20)).tokens == answer(other, 3)
    await fabric.until_idle()


async def test_b039_a_lease_outlasts_any_queue_while_it_is_renewed(fabric: Fabric) -> None:
    decode, prefill = await fabric.decode(lease_s=LEASE_S), await fabric.prefill(num_blocks=NUM_BLOCKS + 1)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    gate, copied = puller(decode).gate, puller(decode).copied
    gate.clear()
    await client.place(make_job("queued", PROMPT), decode.record)
    await client.place(make_job("other", [7, *PROMPT[1:]]), decode.record)  # wants the same pages of the prefill worker
    await until(lambda: client.early_tokens("queued"), "it is prefilled")
    (holding,) = (held for held in prefill.worker._holdings._held.values() if held.task.request == "queued")
    first_end = holding.expires_at
    await until(lambda: holding.expires_at > first_end + 3 * LEASE_S, "three leases are over", 20)
    assert not client.early_tokens("other")
    gate.set()
    for name, prompt in (("queued", PROMPT), ("other", [7, *PROMPT[1:]])):
        assert (await client.answer(name)).tokens == answer(prompt, 5)
    assert len(copied) == 2 * NUM_BLOCKS, "each page came once"
    await fabric.until_idle()


async def test_b039_pages_of_a_lease_that_ended_under_a_queue_are_refused(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = await fabric.decode(lease_s=LEASE_S), await fabric.prefill(num_blocks=NUM_BLOCKS + 1)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)

    async def is_silent() -> None:
        """Renew nothing, and believe in what is held."""

    monkeypatch.setattr(decode.worker._leases, "renew", is_silent)
    gate = puller(decode).gate
    gate.clear()
    await client.place(make_job("queued", PROMPT), decode.record)
    await until(lambda: client.early_tokens("queued"), "it is prefilled")
    await until(lambda: not len(prefill.worker._holdings), "its lease is over", 20)
    await client.place(make_job("other", [7, *PROMPT[1:]]), decode.record)
    await until(lambda: client.early_tokens("other"), "another prompt has its pages")
    gate.set()
    for name, prompt in (("queued", PROMPT), ("other", [7, *PROMPT[1:]])):
        assert (await client.answer(name, deadline_s=20)).tokens == answer(prompt, 5)
    await fabric.until_idle()


async def test_b044_a_worker_with_other_heads_is_no_partner(fabric: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    # A tensor-parallel worker would hold a part of the heads: such pairs are not built, so they are refused.
    config = ModelConfig("llama", 2, 64, 4, 4, 16, 96, 320, 1e-5, RopeConfig(1e4), 2048, tie_embeddings=True)
    whole, half = (KVLayout(2, num_heads, 16, 16, "float32") for num_heads in (4, 2))
    assert fingerprint("m", config, whole) != fingerprint("m", config, half)
    shard = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await shard.start(fingerprint=fingerprint("m", config, half))
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    with caplog.at_level(logging.WARNING):
        await until(lambda: "not pairing with prefill-x" in caplog.text, "the pair is refused in words")
    assert "KV geometry" in caplog.text
    await client.place(make_job("r", PROMPT), decode.record)
    assert (await client.answer("r")).tokens == answer(PROMPT, 5)
    assert not puller(decode).copied
    await fabric.until_idle()
    await shard.stop()
