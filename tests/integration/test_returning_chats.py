"""The next turn of a conversation goes to the worker that has it in its cache, answers included, from any gateway."""

from collections.abc import AsyncIterator, Sequence

import pytest

from common.broker.protocols import Candidate, Placed
from common.messages.codec import pack_ids
from common.messages.ids import RequestId
from common.messages.prefixes import PromptPrefixes, name_prefixes
from common.messages.registry import WorkerRecord
from common.messages.sampling import SamplingParams
from decode_worker.worker import DecodeWorker
from gateway.engine import GenerateRequest
from gateway.placement import prefixes_to_find
from gateway.streams import Stream
from tests.support.broker_records import MODEL
from tests.support.feed_client import make_job
from tests.support.polling import until
from tests.support.tagged_pages import BLOCK_SIZE
from tests.support.worker_fabric import Fabric, Node, running_fabric

PROMPT = list(range(60))


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


async def gateway_prefixes(fabric: Fabric, prompt: Sequence[int], salt: str = "") -> PromptPrefixes:
    """Return what a gateway that has just begun looks for."""
    request = GenerateRequest(RequestId("r"), MODEL, prompt, SamplingParams(seed=1, max_tokens=5), cache_salt=salt)
    return await prefixes_to_find(Stream(request, 3), await fabric.broker.registry.workers())


async def chosen(fabric: Fabric, name: str, prompt: Sequence[int], salt: str = "") -> WorkerRecord:
    """Return who gets a prompt, and take it out again."""
    states = await fabric.broker.registry.workers()
    candidates = [Candidate(state.record.worker, state.record.epoch) for state in states]
    job = make_job(name, prompt, has_prompt=False)
    placed = await fabric.broker.jobs.place(job, 32, candidates, await gateway_prefixes(fabric, prompt, salt))
    assert isinstance(placed, Placed)
    await fabric.broker.jobs.withdraw(job.request, job.placement)
    return next(state.record for state in states if state.record.worker == placed.worker)


def num_cached(fabric: Fabric, node: Node[DecodeWorker], ids: Sequence[int]) -> int:
    """Return how many tokens a worker is known to have."""
    prefixes = name_prefixes(pack_ids(ids), BLOCK_SIZE, node.record.fingerprint, "")
    return fabric.broker.prefixes.num_cached(node.record.worker, node.record.epoch, prefixes)


async def test_the_next_turn_returns(fabric: Fabric) -> None:
    first = await fabric.decode("decode-0", disaggregation="never")
    second = await fabric.decode("decode-1", disaggregation="never")
    client = await fabric.client(first.record, second.record)
    assert await chosen(fabric, "before", PROMPT) == first.record
    await client.place(make_job("turn", PROMPT, max_tokens=8), second.record)
    answer = await client.answer("turn")
    conversation = [*PROMPT, *answer.tokens]
    assert len(PROMPT) < 64 < len(conversation), "what makes the prefix worth a name was generated"
    await until(lambda: num_cached(fabric, second, conversation) == 64, "the cache is told")
    turn = [*conversation, *range(500, 520)]
    assert await chosen(fabric, "next", turn) == second.record
    assert await chosen(fabric, "other", [99, *turn[1:]]) == first.record
    assert await chosen(fabric, "salted", turn, "another tenant's") == first.record
    await fabric.until_idle()


async def test_a_worker_that_starts_again_has_nothing(fabric: Fabric) -> None:
    first = await fabric.decode("decode-0", disaggregation="never")
    second = await fabric.decode("decode-1", disaggregation="never")
    client = await fabric.client(first.record, second.record)
    prompt = list(range(70))
    await client.place(make_job("turn", prompt), second.record)
    await client.answer("turn")
    await until(lambda: num_cached(fabric, second, prompt) == 64, "the cache is told")
    await second.stop()
    assert num_cached(fabric, second, prompt) == 0
    await fabric.decode("decode-1", disaggregation="never")
    assert await chosen(fabric, "next", prompt) == first.record


async def test_what_is_evicted_is_withdrawn(fabric: Fabric) -> None:
    node = await fabric.decode("decode-0", disaggregation="never", num_blocks=32)
    await fabric.decode("decode-1", disaggregation="never")
    client = await fabric.client(node.record)
    prompts = [list(range(first, first + 100)) for first in (0, 200)]
    for number, prompt in enumerate(prompts):
        await client.place(make_job(f"r{number}", prompt), node.record)
        await client.answer(f"r{number}")
        await until(lambda prompt=prompt: num_cached(fabric, node, prompt) == 64, "it is told")
    await until(lambda: num_cached(fabric, node, prompts[0]) == 0, "the evicted one is withdrawn")


async def test_there_is_nothing_to_look_for_where_nothing_may_be_found(fabric: Fabric) -> None:
    await fabric.decode("decode-0", disaggregation="never")
    assert not (await gateway_prefixes(fabric, range(100))).names  # nothing to choose
    await fabric.decode("decode-1", disaggregation="never")
    assert (await gateway_prefixes(fabric, range(100))).names
    assert (await gateway_prefixes(fabric, range(10_000))).names  # named in a thread
    states = await fabric.broker.registry.workers()
    scored = SamplingParams(seed=1, max_tokens=5, num_prompt_logprobs=0)
    request = GenerateRequest(RequestId("r"), MODEL, range(100), scored)
    assert not (await prefixes_to_find(Stream(request, 3), states)).names
