"""Many requests on small pools while copies stall, clients leave, and prefill workers are killed and come back: whoever
stays gets the tokens of an undisturbed request, and in the end nothing is held anywhere.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

import decode_worker.receiver
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.support.feed_client import FeedClient, make_job
from tests.support.polling import turns, until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, Node, puller, running_fabric

NUM_REQUESTS = 40


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 0.5)
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


async def request(client: FeedClient, decode: Node[DecodeWorker], name: str, dice: random.Random) -> None:
    """Live the life of one request; whoever had to make room for a suspect is placed again."""
    prompt = [dice.randrange(3) for _ in range(dice.choice([1, 4, 9, 17, 30]))]
    max_tokens = dice.choice([1, 2, 9])
    await client.place(make_job(name, prompt, max_tokens=max_tokens), decode.record)
    if dice.random() < 0.4:
        await turns(dice.choice([1, 20, 200]))
        await client.cancel(decode.record, name)
        return
    placement = 1
    while (outcome := await client.answer(name, placement, deadline_s=20)).reason == "displaced":
        assert not outcome.tokens
        placement += 1
        await client.place(make_job(name, prompt, placement=placement, max_tokens=max_tokens), decode.record)
    assert outcome.tokens == answer(prompt, max_tokens)


async def stall(decode: Node[DecodeWorker], dice: random.Random) -> None:
    """Let copies stop and go."""
    gate = puller(decode).gate
    while True:
        await turns(dice.randrange(50))
        gate.clear()
        await turns(dice.randrange(50))
        gate.set()
        await asyncio.sleep(0.001)


async def kill(fabric: Fabric, prefill: Node[PrefillWorker], dice: random.Random) -> None:
    """Kill a prefill worker again and again; its successor has its name."""
    while True:
        await asyncio.sleep(dice.random() / 10)
        await prefill.kill()
        prefill = await fabric.prefill(prefill.record.worker, num_blocks=20)


@pytest.mark.parametrize("seed", range(3))
async def test_chaos(fabric: Fabric, seed: int) -> None:
    dice = random.Random(seed)
    decode = await fabric.decode(num_blocks=24, lease_s=0.3, max_sequences=8)
    stable, doomed = await fabric.prefill("prefill-0", num_blocks=20), await fabric.prefill("prefill-1", num_blocks=20)
    await fabric.know(decode, stable, doomed)
    client = await fabric.client(decode.record)
    trouble = [asyncio.create_task(stall(decode, dice)), asyncio.create_task(kill(fabric, doomed, dice))]
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_REQUESTS):
            group.create_task(request(client, decode, str(number), dice))
            await turns(dice.randrange(30))
    assert not [task for task in trouble if task.done()]
    for task in trouble:
        task.cancel()
    await asyncio.gather(*trouble, return_exceptions=True)
    puller(decode).gate.set()
    await until(lambda: not len(decode.worker._ledger), "nobody is left")
    await fabric.until_idle()
    assert not decode.worker._receiver._running
