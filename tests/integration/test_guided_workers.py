"""Grammars in whole workers: wherever prompts are computed, whoever dies, answers match and stay the same."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from common.grammar.limits import MAX_GRAMMAR_BYTES
from common.messages.ids import ChoiceIndex
from common.messages.job import Job, OpenChoice
from common.runtime.grammars import Grammars
from decode_worker.worker import DecodeWorker
from tests.support.broker_records import FINGERPRINT, MODEL
from tests.support.feed_client import FeedClient, make_job
from tests.support.guided import schema_text
from tests.support.polling import until
from tests.support.tagged_pages import VOCABULARY, answer
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, id_of, tiny_card
from tests.support.worker_fabric import Fabric, Node, running_fabric

PROMPT = list(range(100, 130))
TOKENIZER = byte_level_tokenizer()
END = id_of(TOKENIZER, EOS)
CARD = tiny_card(TOKENIZER, model=MODEL, fingerprint=FINGERPRINT, vocab_size=VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["né", "日本"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMAR = schema_text(SCHEMA)
MAX_TOKENS = 80


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


def guided_job(request: str, grammar: str = GRAMMAR, **changes: Any) -> Job:
    """Return a job whose answer must match a grammar."""
    job = make_job(request, PROMPT, max_tokens=MAX_TOKENS, stop_ids=(END,), **changes)
    return msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, grammar=grammar))


def parsed(tokens: list[int], tokenizer: Tokenizer = TOKENIZER) -> Any:
    """Return the value in a whole answer."""
    assert tokens[-1] == END
    return json.loads(tokenizer.decode(tokens[:-1]))


async def alone(fabric: Fabric, name: str = "decode-0") -> tuple[Node[DecodeWorker], FeedClient]:
    """Start a decode worker that prefills its own prompts."""
    decode = await fabric.decode(name, card=CARD)
    return decode, await fabric.client(decode.record)


async def undisturbed(fabric: Fabric) -> list[int]:
    """Return the answer of one worker that nobody disturbs."""
    decode, client = await alone(fabric, "calm")
    await client.place(guided_job("calm"), decode.record)
    tokens = (await client.answer("calm")).tokens
    assert set(parsed(tokens)) == {"name", "kind"}
    return tokens


async def test_an_answer_is_of_its_grammar(fabric: Fabric) -> None:
    tokens = await undisturbed(fabric)
    assert parsed(tokens)["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    await fabric.until_idle()


async def test_b052_a_remote_prefill_gives_the_same_answer(fabric: Fabric) -> None:
    expected = await undisturbed(fabric)
    decode = await fabric.decode("decode-1", card=CARD)
    prefill = await fabric.prefill(card=CARD)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    await client.place(guided_job("r"), decode.record)
    assert (await client.answer("r")).tokens == expected
    assert client.early_tokens("r") == expected[:1]
    assert prefill.valve.computed("r")
    await fabric.until_idle()


async def test_every_choice_follows_the_grammar_for_itself(fabric: Fabric) -> None:
    expected = await undisturbed(fabric)
    decode, client = await alone(fabric)
    choices = tuple(OpenChoice(ChoiceIndex(index)) for index in range(3))
    await client.place(msgspec.structs.replace(guided_job("r"), choices=choices), decode.record)
    events = client.events["r", 1]
    await until(lambda: client.kinds("r").count("finished") == len(choices), "all choices have ended")
    answers: list[list[int]] = [[], [], []]
    for event in events:
        if event.WhichOneof("event") == "tokens":
            answers[event.tokens.choice] += event.tokens.ids
    assert answers[0] == expected
    assert len({tuple(tokens) for tokens in answers}) > 1
    for tokens in answers:
        assert set(parsed(tokens)) == {"name", "kind"}
    await fabric.until_idle()


@pytest.mark.parametrize("num_shown", [1, 7, 20])
async def test_a_later_placement_goes_on_within_the_grammar(fabric: Fabric, num_shown: int) -> None:
    expected = await undisturbed(fabric)
    decode, client = await alone(fabric)
    await client.place(guided_job("r", shown=expected[:num_shown], placement=2), decode.record)
    assert (await client.answer("r", 2)).tokens == expected[num_shown:]
    await fabric.until_idle()


async def test_preempted_sequences_go_on_within_their_grammars(fabric: Fabric) -> None:
    decode = await fabric.decode(card=CARD, num_blocks=40)
    client = await fabric.client(decode.record)
    names = [f"r{number}" for number in range(4)]
    decode.valve.close()
    for name in names:
        await client.place(guided_job(name), decode.record)
        await until(lambda: decode.valve.is_holding, "the grammar is compiled")
    await until(lambda: all(client.kinds(name) for name in names), "the engine has them all")
    decode.valve.open()
    answers = [(await client.answer(name)).tokens for name in names]
    assert decode.edge.load.num_preemptions
    assert answers == [answers[0]] * len(names)
    assert set(parsed(answers[0])) == {"name", "kind"}
    await fabric.until_idle()


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "nonsense",
        '{"grammars":[{"json_schema":{"properties":{"foo":"bar"}}}]}',
        '{"grammars":[{"lark_grammar":"start: /[/"}]}',
        " " * (MAX_GRAMMAR_BYTES + 1),
    ],
)
async def test_b032_a_bad_grammar_fails_its_own_request_alone(fabric: Fabric, grammar: str) -> None:
    decode, client = await alone(fabric)
    await client.place(make_job("plain", PROMPT), decode.record)
    await client.place(guided_job("bad", grammar), decode.record)
    await client.place(guided_job("good"), decode.record)
    assert (await client.answer("bad")).reason == "invalid_request"
    assert not client.events["bad", 1][-1].failed.is_retryable
    assert (await client.answer("plain")).tokens == answer(PROMPT, 5)
    assert set(parsed((await client.answer("good")).tokens)) == {"name", "kind"}
    await fabric.until_idle()


async def test_shown_tokens_that_are_not_of_the_grammar_fail_their_request_alone(fabric: Fabric) -> None:
    decode, client = await alone(fabric)
    await client.place(guided_job("bad", shown=[5], placement=2), decode.record)
    await client.place(make_job("plain", PROMPT), decode.record)
    assert (await client.answer("bad", 2)).reason == "grammar_violated"
    assert (await client.answer("plain")).tokens == answer(PROMPT, 5)
    await fabric.until_idle()


async def test_without_a_usable_vocabulary_grammars_are_refused_and_all_else_is_served(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(guided_job("r"), decode.record)
    await client.place(make_job("plain", PROMPT), decode.record)
    assert (await client.answer("r")).reason == "invalid_request"
    assert (await client.answer("plain")).tokens == answer(PROMPT, 5)
    await fabric.until_idle()


async def test_what_waits_for_its_grammar_can_be_cancelled(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Grammars, "when_ready", lambda _, grammar, then: calls.append(then))
    decode, client = await alone(fabric)
    await client.place(guided_job("r"), decode.record)
    await until(lambda: calls, "its grammar is being compiled")
    await client.cancel(decode.record, "r")
    calls[0](None)
    await client.place(make_job("plain", PROMPT), decode.record)
    assert (await client.answer("plain")).tokens == answer(PROMPT, 5)
    assert client.kinds("r") == ["accepted"]
    assert not decode.valve.computed("r")
    await fabric.until_idle()


async def test_what_waits_for_its_grammar_is_handed_back_by_a_worker_that_leaves(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Grammars, "when_ready", lambda _, grammar, then: calls.append(then))
    decode, client = await alone(fabric)
    await client.place(guided_job("r"), decode.record)
    await until(lambda: calls, "its grammar is being compiled")
    decode.signals.stop.set()
    assert (await client.answer("r")).reason == "worker_draining"
    assert client.events["r", 1][-1].failed.is_retryable
    calls[0](None)
    assert await decode.task == 0
    assert client.kinds("r") == ["accepted", "failed"]


async def test_a_prefill_worker_that_cannot_follow_it_costs_the_request_and_nobody_else(fabric: Fabric) -> None:
    decode, prefill = await fabric.decode(card=CARD), await fabric.prefill()
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    await client.place(guided_job("r"), decode.record)
    await client.place(make_job("plain", PROMPT), decode.record)
    assert (await client.answer("r")).reason == "grammar_violated"
    assert (await client.answer("plain")).tokens == answer(PROMPT, 5)
    await fabric.until_idle()
