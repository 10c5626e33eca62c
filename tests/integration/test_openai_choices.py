"""Several choices and several prompts in one request: whose text is whose, when it ends, what is counted."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import WorkerLost
from gateway.engine import FinishReason
from tests.support.gateway_server import Gateway, chat_body, raw_request, running_gateway
from tests.support.polling import until
from tests.support.scripted_engine import Say, ScriptedEngine, Silence, Step, Stop, Until
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
END = id_of(TOKENIZER, EOS)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello"} | fields


BODIES = {CHAT: chat_body, TEXT: text_body}


def say(choice: int, text: str) -> Say:
    return Say(choice, tuple(byte_ids(TOKENIZER, text)))


def one_by_one(choice: int, text: str) -> list[Step]:
    return [Say(choice, (token_id,)) for token_id in byte_ids(TOKENIZER, text)]


def end(choice: int, reason: FinishReason = FinishReason.STOP, num_cached: int = 0) -> Stop:
    return Stop(reason, num_cached, choice)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


def texts_of(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice of a stream, which ends as every stream must: see I1 in the tests' names."""
    *chunks, done = events
    assert done == "[DONE]"
    assert "[DONE]" not in chunks
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index = choice["index"]
        assert index not in reasons  # nothing follows the end of a choice
        texts[index] = texts.get(index, "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
    assert reasons.keys() == texts.keys()
    return dict(sorted(texts.items()))


def reasons_of(events: list[Any]) -> dict[int, str]:
    choices = [choice for chunk in events[:-1] for choice in chunk["choices"]]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


def whole_texts(answer: Any) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


# n


SCRIPT_OF_THREE: list[Step] = [
    *(say(2, "c"), say(0, "a"), say(1, "b"), end(1), say(2, "cc"), say(0, "a"), end(0), say(2, "c")),
    end(2, FinishReason.LENGTH),
]


@pytest.mark.parametrize("path", BODIES)
async def test_b002_b014_three_choices_that_end_one_after_the_other(gateway: Gateway, path: str) -> None:
    gateway.engine.play(SCRIPT_OF_THREE)
    events = await gateway.events(path, BODIES[path](n=3, **USAGE))
    assert texts_of(events) == {0: "aa", 1: "b", 2: "cccc"}
    assert reasons_of(events) == {0: "stop", 1: "stop", 2: "length"}
    *_, usage, _ = events
    assert usage["choices"] == []
    assert [event for event in events[:-1] if event["usage"] is not None] == [usage]
    assert gateway.engine.requests[0].num_choices == 3

    gateway.engine.play(SCRIPT_OF_THREE)
    status, answer = await gateway.post(path, BODIES[path](n=3))
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert whole_texts(answer) == ["aa", "b", "cccc"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop", "length"]
    assert answer["usage"] == usage["usage"]


async def test_b018_the_role_comes_first_in_each_choice_and_once(gateway: Gateway) -> None:
    gateway.engine.play(SCRIPT_OF_THREE)
    events = await gateway.events(CHAT, chat_body(n=3, stream=True))
    for index in range(3):
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


@pytest.mark.parametrize("path", BODIES)
async def test_b017_usage_counts_the_prompt_once_and_all_choices(gateway: Gateway, path: str) -> None:
    script: list[Step] = [say(0, "abc"), say(1, "defgh"), end(1, num_cached=2), end(0, num_cached=2)]
    gateway.engine.play(script)
    _, answer = await gateway.post(path, BODIES[path](n=2))
    num_prompt = len(gateway.engine.requests[0].prompt_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("streams", [True, False])
async def test_b005_each_choice_is_judged_by_its_own_length(gateway: Gateway, streams: bool) -> None:
    script: list[Step] = [say(0, "sixsix"), say(1, "seven.."), end(0), end(1)]
    gateway.engine.play(script)
    if streams:
        reasons = reasons_of(await gateway.events(TEXT, text_body(n=2, max_tokens=7, stream=True)))
    else:
        _, answer = await gateway.complete(n=2, max_tokens=7)
        reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    assert reasons == {0: "stop", 1: "length"}


@pytest.mark.parametrize("path", BODIES)
async def test_b006_a_stop_string_ends_its_own_choice(gateway: Gateway, path: str) -> None:
    """The engine is told of that choice alone; the last one that meets its stop string closes the stream."""
    gateway.engine.play([say(0, "aST!"), say(1, "b"), say(0, "never"), say(1, "bST"), Silence()])
    events = await gateway.events(path, BODIES[path](n=2, stop="ST", **USAGE))
    assert texts_of(events) == {0: "a", 1: "bb"}
    assert reasons_of(events) == {0: "stop", 1: "stop"}
    assert events[-2]["usage"]["completion_tokens"] == 3 + 4
    assert {choice for _, choice in gateway.engine.ended} == {0}
    await gateway.engine.until_running(0)


async def test_n_1_to_128(gateway: Gateway) -> None:
    gateway.engine.play([*(say(index, "x") for index in range(128)), *(end(index) for index in reversed(range(128)))])
    _, answer = await gateway.complete(n=128)
    assert [choice["index"] for choice in answer["choices"]] == list(range(128))


# Prompts


@pytest.mark.parametrize("streams", [True, False])
async def test_b002_b014_a_batch_in_prompt_major_order(gateway: Gateway, streams: bool) -> None:
    """The second prompt finishes first; the echo shows whose prompt a choice belongs to."""
    gate = asyncio.Event()
    scripts: list[list[Step]] = [
        [Until(gate), say(0, "a0"), say(1, "a1"), end(1), end(0)],
        [say(1, "b1"), say(0, "b0"), end(0), end(1)],
        [Until(gate), say(0, "c0"), end(0), say(1, "c1"), end(1)],
    ]
    gateway.engine.play(*scripts)
    fields = {"prompt": ["A", "BB", "CCC"], "n": 2, "echo": True, "max_tokens": 3}
    asking = asyncio.create_task(
        gateway.events(TEXT, text_body(**fields, **USAGE)) if streams else gateway.post(TEXT, text_body(**fields))
    )
    await until(lambda: (len(gateway.engine.requests), gateway.engine.num_running) == (3, 2))
    gate.set()
    got: Any = await asking
    expected = ["Aa0", "Aa1", "BBb0", "BBb1", "CCCc0", "CCCc1"]
    if streams:
        assert texts_of(got) == dict(enumerate(expected))
        usage = got[-2]["usage"]
    else:
        assert whole_texts(got[1]) == expected
        assert [choice["index"] for choice in got[1]["choices"]] == list(range(6))
        usage = got[1]["usage"]
    assert usage["prompt_tokens"] == 1 + 2 + 3
    assert usage["completion_tokens"] == 12


async def test_b017_usage_of_a_batch(gateway: Gateway) -> None:
    scripts: list[list[Step]] = [
        [say(0, "abc"), say(1, "abcde"), end(0, num_cached=3), end(1, num_cached=3)],
        [say(0, "abcde"), say(1, "abc"), end(0), end(1)],
    ]
    gateway.engine.play(*scripts)
    fields = {"prompt": [[1] * 7, [2] * 9], "n": 2}
    _, whole = await gateway.complete(**fields)
    assert whole["usage"] == {
        "prompt_tokens": 16,
        "completion_tokens": 16,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    gateway.engine.play(*scripts)
    assert (await gateway.events(TEXT, text_body(**fields, **USAGE)))[-2]["usage"] == whole["usage"]


async def test_prompts_are_requests_of_their_own_with_names_of_the_whole(gateway: Gateway) -> None:
    await gateway.complete(prompt=["a", "b", "c"], seed=7)
    requests = gateway.engine.requests
    first = requests[0].request
    assert [request.request for request in requests] == [first, f"{first}-1", f"{first}-2"]
    assert {request.sampling.seed for request in requests} == {7}


@pytest.mark.parametrize(
    "prompt",
    [
        ["ok", ""],
        ["", "ok"],
        [[1], []],
        [[1], [CARD.vocab_size]],
        [[1], [-1]],
        [[1], [1] * 64],
        [[1, 2], "x"],
        ["x"] * 129,
    ],
)
@pytest.mark.parametrize("streams", [True, False])
async def test_b019_b020_one_bad_prompt_refuses_all(gateway: Gateway, prompt: list[object], streams: bool) -> None:
    status, answer = await gateway.complete(prompt=prompt, stream=streams)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert gateway.engine.requests == []


@pytest.mark.parametrize("streams", [True, False])
async def test_a_prompt_that_fails_ends_the_others(gateway: Gateway, streams: bool) -> None:
    gateway.engine.play([say(0, "a"), Silence()], [WorkerLost("gone")])
    status, answer = await gateway.complete(prompt=["a", "b"])
    assert (status, answer["error"]["code"]) == (503, "worker_lost")
    await gateway.engine.until_running(0)


async def test_b015_a_client_that_leaves_ends_all_its_prompts(gateway: Gateway) -> None:
    gateway.engine.play([say(0, "a"), Silence()])
    async with gateway.connection() as (reader, writer):
        writer.write(raw_request(TEXT, text_body(prompt=["a", "b", "c"], n=2, stream=True)))
        await gateway.engine.until_running(3)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    await gateway.engine.until_running(0)


# best_of


async def test_best_of_sends_the_likeliest(gateway: Gateway) -> None:
    """The lower an id modulo 32, the likelier it is; the mean counts, not the sum; the end token counts, too."""
    script: list[Step] = [
        *(Say(0, (33, 34)), Say(1, (32, 32, 34)), Say(2, (40,)), Say(3, (32,))),
        *(end(index) for index in range(4)),
    ]
    gateway.engine.play(script)
    _, answer = await gateway.complete(best_of=4, n=3)
    expected = [TOKENIZER.decode(ids) for ids in ([32], [32, 32, 34], [33, 34])]
    assert whole_texts(answer) == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 2 + 3 + 1 + 1
    assert all(choice["logprobs"] is None for choice in answer["choices"])


async def test_best_of_a_batch_is_the_best_of_each_prompt(gateway: Gateway) -> None:
    gateway.engine.play(
        [Say(0, (34,)), Say(1, (33,)), end(0), end(1)],
        [Say(0, (35,)), Say(1, (36,)), end(0), end(1)],
    )
    _, answer = await gateway.complete(prompt=["a", "b"], best_of=2)
    assert whole_texts(answer) == [TOKENIZER.decode([33]), TOKENIZER.decode([35])]
    assert answer["usage"]["completion_tokens"] == 4


# echo


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [("hello the", "hello the"), ("日本 é", "日本 é"), (byte_ids(TOKENIZER, "日x"), "日x"), ([[END, 5]], None)],
)
@pytest.mark.parametrize("streams", [True, False])
async def test_echo(gateway: Gateway, prompt: Any, shown: str | None, streams: bool) -> None:
    shown = TOKENIZER.decode([5]) if shown is None else shown
    gateway.engine.play([say(0, "!"), end(0)])
    if streams:
        assert texts_of(await gateway.events(TEXT, text_body(prompt=prompt, echo=True, stream=True))) == {
            0: shown + "!"
        }
    else:
        _, answer = await gateway.complete(prompt=prompt, echo=True)
        assert whole_texts(answer) == [shown + "!"]


async def test_echo_shows_no_bos_that_the_server_has_put_there() -> None:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, add_bos=True)])) as gateway:
        gateway.engine.play([say(0, "!"), end(0)])
        _, answer = await gateway.complete(prompt="日", echo=True, logprobs=0, max_tokens=1)
        assert whole_texts(answer) == ["日!"]
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 0, 1]
        assert logprobs["tokens"] == ["<|bos|>", "日", "!"]


async def test_a_stop_string_does_not_count_in_the_echo(gateway: Gateway) -> None:
    gateway.engine.play([say(0, "oST"), end(0)])
    _, answer = await gateway.complete(prompt="hST S", echo=True, stop=["ST", " So"])
    assert whole_texts(answer) == ["hST So"]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_nothing_but_the_prompt(gateway: Gateway, streams: bool, n: int) -> None:
    gateway.engine.play([Say(0, (5,)), Say(1, (END,))] if n == 2 else [(5,)])
    fields = {"prompt": "hello", "echo": True, "max_tokens": 0, "n": n, "stop": TOKENIZER.decode([5])}
    if streams:
        events = await gateway.events(TEXT, text_body(**fields, **USAGE))
        texts, reasons, usage = texts_of(events), reasons_of(events), events[-2]["usage"]
    else:
        _, answer = await gateway.complete(**fields)
        texts, usage = dict(enumerate(whole_texts(answer))), answer["usage"]
        reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    assert texts == dict.fromkeys(range(n), "hello")
    assert reasons == dict.fromkeys(range(n), "length")
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(TOKENIZER.encode("hello").ids))


async def test_an_echo_above_all_bounds_is_refused(gateway: Gateway) -> None:
    gateway.engine.cards = [tiny_card(TOKENIZER, max_context=10_000)]
    status, answer = await gateway.complete(prompt=[[1] * 2000], n=128, echo=True)
    assert (status, answer["error"]["param"]) == (400, "echo")
    assert gateway.engine.requests == []
