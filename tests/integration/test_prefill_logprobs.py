"""What a prefill worker tells beside the first token: for which choice it is, logprobs of it and of the prompt."""

from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

import prefill_worker.intake
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_of
from common.scheduling.plan import StepPlan, StepResult
from prefill_worker.worker import PrefillWorker
from proto import worker_pb2 as pb
from tests.support.likelihoods import likelihood
from tests.support.polling import until
from tests.support.scripted_author import SAMPLING, ScriptedAuthor
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import SECRET, Fabric, Node, running_fabric

PROMPT = list(range(600, 630))
SCORED = msgspec.structs.replace(SAMPLING, num_logprobs=1)
ECHOED = msgspec.structs.replace(SCORED, num_prompt_logprobs=1)


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


def read(messages: Sequence[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [logprobs_of(message) for message in messages]


async def test_the_first_token_comes_with_its_logprobs(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    client = await fabric.client(prefill.record)
    await author.publish("r", PROMPT, sampling=SCORED)
    commit = await author.committed()
    expected = likelihood(answer(PROMPT, 1)[0])
    assert logprobs_of(commit.logprobs) == expected
    assert not commit.prompt_logprobs
    await until(lambda: client.events["r", 1], "the early copy is here")
    (early,) = client.events["r", 1]
    assert read(early.tokens.logprobs) == [expected]


async def test_nothing_is_told_that_was_not_asked_for(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    client = await fabric.client(prefill.record)
    await author.publish("r", PROMPT)
    commit = await author.committed()
    assert not commit.HasField("logprobs")
    assert not commit.prompt_logprobs
    await until(lambda: client.events["r", 1], "the early copy is here")
    (early,) = client.events["r", 1]
    assert not early.tokens.logprobs


async def test_logprobs_of_the_prompt_come_with_the_commit_and_no_early_copy_before_them(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    client = await fabric.client(prefill.record)
    await author.publish("r", PROMPT, sampling=ECHOED)
    commit = await author.committed()
    assert commit.token == answer(PROMPT, 1)[0]
    assert read(commit.prompt_logprobs) == [likelihood(token) for token in PROMPT[1:]]
    await author.publish("other", PROMPT[:3])
    await until(lambda: client.events["other", 1], "the early copy of another one is here")
    assert not client.events["r", 1]


async def test_a_cached_prompt_is_computed_again_for_its_logprobs(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    for request, sampling, num_cached in (("first", ECHOED, 0), ("again", ECHOED, 0), ("plain", SAMPLING, 28)):
        await author.publish(request, PROMPT, sampling=sampling)
        commit = await author.committed(request)
        assert commit.num_cached_tokens == num_cached
        assert len(commit.prompt_logprobs) == (len(PROMPT) - 1 if sampling is ECHOED else 0)


async def test_who_continues_an_answer_does_not_score_its_prompt_again(
    author: ScriptedAuthor, prefill: Node[PrefillWorker]
) -> None:
    await author.publish("r", PROMPT, num_shown=3, sampling=ECHOED)
    commit = await author.committed()
    assert commit.HasField("logprobs")
    assert not commit.prompt_logprobs


async def test_a_choice_other_than_the_first(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], fabric: Fabric
) -> None:
    client = await fabric.client(prefill.record)
    await author.publish("r", PROMPT, choice=3)
    commit = await author.committed()
    token = answer(PROMPT, 1, choice=3)[0]
    assert commit.token == token != answer(PROMPT, 1)[0]
    await until(lambda: client.events["r", 1], "the early copy is here")
    (early,) = client.events["r", 1]
    assert (early.tokens.choice, list(early.tokens.ids)) == (3, [token])
    assert await author.renew(prefill.record, "r") == []
    await author.release(prefill.record, "r")
    await until(lambda: not len(prefill.worker._holdings) and prefill.is_idle, "its pages are released")


async def test_an_answer_that_its_grammar_does_not_allow(
    author: ScriptedAuthor, prefill: Node[PrefillWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prefill.edge.engine
    assert engine is not None
    run = engine._runner.run

    def violate(plan: StepPlan) -> StepResult:
        result = run(plan)
        return StepResult({}, violated=frozenset(result.tokens))

    monkeypatch.setattr(engine._runner, "run", violate)
    await author.publish("r", PROMPT)
    assert (await author.committed()).failure == "grammar_violated"
    await until(lambda: not len(prefill.worker._holdings) and prefill.is_idle, "everything is released")
