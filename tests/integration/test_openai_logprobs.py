"""Logprobs in both shapes: one entry per token, streamed or not, whatever of the text is held back."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from common.messages.logprobs import TokenLogprobs
from tests.support.gateway_server import Gateway, chat_body, running_gateway, text_of
from tests.support.scripted_engine import Say, ScriptedEngine, Step, Stop, logprobs_of
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
END = id_of(TOKENIZER, EOS)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


def spoken(text: str) -> list[Step]:
    return [*byte_ids(TOKENIZER, text), END, Stop()]


def contents_of(events: list[Any]) -> list[Any]:
    """Return the concatenated entries of a chat's stream; chunks without any have null."""
    told = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    assert all(logprobs is None or (logprobs["content"] and logprobs["refusal"] is None) for logprobs in told)
    return [entry for logprobs in told if logprobs is not None for entry in logprobs["content"]]


def joined(events: list[Any]) -> dict[str, list[Any]]:
    """Return the concatenated lists of a completion's stream."""
    told = [choice["logprobs"] for event in events[:-1] for choice in event["choices"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for logprobs in told if logprobs is not None for item in logprobs[name]] for name in names}


def only(index: int, events: list[Any]) -> list[Any]:
    """Return a stream without all other choices."""
    *chunks, done = events
    return [{"choices": [choice for choice in chunk["choices"] if choice["index"] == index]} for chunk in chunks] + [
        done
    ]


# Chat


@pytest.mark.parametrize(("fields", "num_top"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)])
async def test_b010_shape_of_a_chat(gateway: Gateway, fields: dict[str, Any], num_top: int) -> None:
    gateway.engine.play(spoken("hi"))
    _, answer = await gateway.chat(logprobs=True, **fields)
    [choice] = answer["choices"]
    assert choice["logprobs"]["refusal"] is None
    top = [
        {"token": TOKENIZER.decode([token_id]), "logprob": logprobs_of(token_id, 0).logprob}
        for token_id in range(num_top)
    ]
    assert choice["logprobs"]["content"] == [
        {
            "token": letter,
            "logprob": logprobs_of(id_of(TOKENIZER, letter), 0).logprob,
            "bytes": [ord(letter)],
            "top_logprobs": [entry | {"bytes": list(str(entry["token"]).encode())} for entry in top],
        }
        for letter in "hi"
    ]
    gateway.engine.play(spoken("hi"))
    events = await gateway.events(CHAT, chat_body(logprobs=True, stream=True, **fields))
    assert contents_of(events) == choice["logprobs"]["content"]


@pytest.mark.parametrize("fields", [{"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2}])
async def test_b010_what_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    status, answer = await gateway.chat(**fields)
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")


async def test_logprobs_are_null_unless_asked_for(gateway: Gateway) -> None:
    gateway.engine.play(spoken("hi"))
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        _, answer = await gateway.chat(**fields)
        assert answer["choices"][0]["logprobs"] is None
    assert all(request.sampling.num_logprobs is None for request in gateway.engine.requests)


@pytest.mark.parametrize("text", ["a日本é", "👩\u200d💻x"])
async def test_b009_b010_half_characters_have_their_own_bytes(gateway: Gateway, text: str) -> None:
    gateway.engine.play(spoken(text))
    events = await gateway.events(CHAT, chat_body(logprobs=True, stream=True))
    entries = contents_of(events)
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert len(entries) == len(text.encode())
    assert text_of(events) == text
    assert {entry["token"] for entry in entries if entry["bytes"][0] >= 128} == {
        f"\\x{byte:02x}" for byte in text.encode() if byte >= 128
    }


async def test_b009_an_answer_cut_within_a_character(gateway: Gateway) -> None:
    gateway.engine.play(spoken("日"))
    _, answer = await gateway.chat(logprobs=True, max_tokens=2)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "\ufffd"
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE6], [0x97]]


@pytest.mark.parametrize(
    ("script", "fields", "text", "told", "has_end"),
    [
        (spoken("aST!"), {"stop": "ST"}, "a", "aST", False),
        (spoken("abSx"), {"stop": "ST"}, "abSx", "abSx", True),
        (spoken("aS"), {"stop": "ST"}, "aS", "aS", True),
        ([tuple(byte_ids(TOKENIZER, "aSTbc")), Stop()], {"stop": "ST"}, "a", "aST", False),
        (spoken("a日ST"), {"stop": "ST", "max_tokens": 20}, "a日", "a日ST", False),
        (
            spoken("ab"),
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            f"ab{EOS}",
            f"ab{EOS}",
            True,
        ),
    ],
)
async def test_b010_one_entry_per_counted_token(
    gateway: Gateway, script: list[Step], fields: dict[str, Any], text: str, told: str, has_end: bool
) -> None:
    """Tokens of a stop string count, so they are told; the token that ends the answer is told if it is shown."""
    gateway.engine.play(script)
    _, whole = await gateway.chat(logprobs=True, **fields)
    [choice] = whole["choices"]
    gateway.engine.play(script)
    events = await gateway.events(CHAT, chat_body(logprobs=True, stream=True, **fields))
    assert choice["message"]["content"] == text_of(events) == text
    assert choice["logprobs"]["content"] == contents_of(events)
    assert b"".join(bytes(entry["bytes"]) for entry in contents_of(events)) == told.encode()
    is_end_hidden = has_end and EOS not in told
    assert len(contents_of(events)) == whole["usage"]["completion_tokens"] - is_end_hidden


async def test_each_choice_has_its_own(gateway: Gateway) -> None:
    a, b = id_of(TOKENIZER, "a"), id_of(TOKENIZER, "b")
    gateway.engine.play([Say(1, (b,)), Say(0, (a,)), Say(1, (b,)), Stop(), Stop(choice=1)])
    _, answer = await gateway.chat(logprobs=True, n=2)
    told = [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in answer["choices"]]
    assert told == [["a"], ["b", "b"]]


# Completions


@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_shape_of_a_completion(gateway: Gateway, num_top: int) -> None:
    gateway.engine.play(spoken("a日b"))
    _, answer = await gateway.complete(logprobs=num_top)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    ids = byte_ids(TOKENIZER, "a日b")
    assert logprobs["tokens"] == ["a", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "b"]
    assert logprobs["token_logprobs"] == [logprobs_of(token_id, 0).logprob for token_id in ids]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == own
        assert len(top) <= num_top + 1
        assert list(top.values())[:num_top] == [logprobs_of(token_id, 0).logprob for token_id in range(num_top)]
    gateway.engine.play(spoken("a日b"))
    assert joined(await gateway.events(TEXT, text_body(logprobs=num_top, stream=True))) == logprobs


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}, {"n": 2}])
async def test_echo_with_logprobs_of_the_prompt(gateway: Gateway, fields: dict[str, Any], streams: bool) -> None:
    prompt = byte_ids(TOKENIZER, "x日y")
    indices = range(fields.get("n", 1))
    said = tuple(byte_ids(TOKENIZER, "a"))
    gateway.engine.play([*(Say(index, said) for index in indices), *(Stop(choice=index) for index in indices)])
    body = text_body(prompt=prompt, echo=True, logprobs=1, **fields)
    if streams:
        events = await gateway.events(TEXT, body | {"stream": True})
        told = [joined(only(index, events)) for index in indices]
    else:
        told = [choice["logprobs"] for choice in (await gateway.post(TEXT, body))[1]["choices"]]
    generated = [] if "max_tokens" in fields else ["a"]
    for logprobs in told:
        assert logprobs["tokens"] == ["x", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "y", *generated]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:5] == [logprobs_of(token_id, 0).logprob for token_id in prompt[1:]]
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3][: 5 + len(generated)]
    assert gateway.engine.requests[0].sampling.num_prompt_logprobs == 1


async def test_a_long_echo_comes_in_pieces_and_whole(gateway: Gateway) -> None:
    gateway.engine.cards = [tiny_card(TOKENIZER, max_context=5000)]
    prompt = byte_ids(TOKENIZER, "hello the " * 150)
    gateway.engine.play([(5,), Stop()])
    body = text_body(prompt=prompt, echo=True, logprobs=2, max_tokens=4)
    _, whole = await gateway.post(TEXT, body)
    events = await gateway.events(TEXT, body | {"stream": True})
    assert joined(events) == whole["choices"][0]["logprobs"]
    assert text_of(events) == whole["choices"][0]["text"] == "hello the " * 150 + TOKENIZER.decode([5])
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1


async def test_an_echo_whose_logprobs_the_engine_does_not_tell_is_an_error(gateway: Gateway) -> None:
    gateway.engine.play([Stop()])
    status, answer = await gateway.complete(echo=True, logprobs=1)
    assert (status, answer["error"]["code"]) == (500, "generation_failed")


# Numbers that JSON has not


@pytest.mark.parametrize("streams", [True, False])
async def test_b012_impossible_tokens_are_minus_9999(gateway: Gateway, streams: bool) -> None:
    impossible = TokenLogprobs(-math.inf, ((0, 0.0), *((token_id, -math.inf) for token_id in range(1, 20))))
    script: list[Step] = [Say(0, (40,), (impossible,)), Stop()]
    gateway.engine.play(script)
    fields = {"logprobs": True, "top_logprobs": 20, "logit_bias": {"5": -100}, "top_k": 1}
    if streams:
        [entry] = contents_of(await gateway.events(CHAT, chat_body(stream=True, **fields)))
    else:
        [entry] = (await gateway.chat(**fields))[1]["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0] + [-9999.0] * 19

    gateway.engine.play(script)
    _, answer = await gateway.complete(logprobs=5, top_k=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert set(logprobs["top_logprobs"][0].values()) == {0.0, -9999.0}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("streams", [True, False])
async def test_b012_an_answer_within_a_schema_has_logprobs_that_are_json(gateway: Gateway, streams: bool) -> None:
    """What a grammar forbids, or the model holds impossible, is told by the number that OpenAI has for it."""
    gateway.engine.cards = [tiny_card(TOKENIZER)]  # a model whose answers end
    ids = byte_ids(TOKENIZER, '{"a": 1}')
    forced = [
        TokenLogprobs(-math.inf if index % 2 else -0.5, ((7, 0.0), *((other, -math.inf) for other in range(8, 27))))
        for index in range(len(ids))
    ]
    gateway.engine.play([Say(0, tuple(ids), tuple(forced)), Stop()])
    body = chat_body(stream=streams, logprobs=True, top_logprobs=20, max_tokens=30, **GUIDED)
    async with gateway.session.post(gateway.url + CHAT, json=body) as response:
        assert response.status == 200
        text = await response.text()
    documents = [line.removeprefix("data: ") for line in text.splitlines()] if streams else [text]
    answers = [json.loads(each, parse_constant=no_constant) for each in documents if each and each != "[DONE]"]
    choices = [choice for answer in answers for choice in answer["choices"]]
    messages = [choice["delta" if streams else "message"] for choice in choices]
    assert json.loads("".join(message.get("content") or "" for message in messages)) == {"a": 1}
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["logprob"] for entry in entries] == [-9999.0 if index % 2 else -0.5 for index in range(len(ids))]
    for entry in entries:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0] + [-9999.0] * 19
    (asked,) = gateway.engine.requests
    assert asked.sampling.grammar is not None
    assert asked.sampling.num_logprobs == 20


async def test_tokens_with_the_same_text_share_an_entry_that_is_the_likeliest(gateway: Gateway) -> None:
    """Ids without a token, as in a padded vocabulary, have no text at all."""
    gateway.engine.cards = [tiny_card(TOKENIZER, vocab_size=CARD.vocab_size + 8)]
    nameless = CARD.vocab_size + 1
    logprobs = TokenLogprobs(-3.0, ((nameless, -1.0), (nameless + 1, -2.0)))
    gateway.engine.play([Say(0, (nameless + 2,), (logprobs,)), Stop()])
    _, answer = await gateway.complete(logprobs=2)
    told = answer["choices"][0]["logprobs"]
    assert (told["tokens"], told["token_logprobs"], told["top_logprobs"]) == ([""], [-3.0], [{"": -1.0}])
