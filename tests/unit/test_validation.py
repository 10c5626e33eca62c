"""Request bodies: what is served, what is refused, and which parameter an error names."""

import json
import logging
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams

from common.errors import ContextLengthExceeded, InvalidRequest
from common.messages.sampling import SamplingParams
from gateway.sampling import settle_sampling
from gateway.schemas.chat import ChatMessage, ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import StreamOptions
from gateway.unsupported import CHAT_REFUSED, COMPLETION_REFUSED, WITHOUT_EFFECT
from gateway.validation import (
    MAX_PROMPTS,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    ValidRequest,
    parse_chat,
    parse_completion,
)
from tests.support.tiny_tokenizer import tiny_card

SEED = 4711
CARD = tiny_card(default_temperature=0.6, default_top_p=0.9, default_top_k=20)
V = CARD.vocab_size


def chat(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode())


def completion(**fields: Any) -> ValidRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def raw_chat(fields: str) -> ValidRequest:
    return parse_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}],%b}' % fields.encode())


def settle(request: ValidRequest, num_prompt: int = 8) -> SamplingParams:
    return settle_sampling(request, CARD, num_prompt, SEED)


def refused_param(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        settle(chat(**fields))
    return caught.value.param


# Shapes of the prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt("hi")),
        (["hi"], TextPrompt("hi")),
        ([1, 2], TokenPrompt([1, 2])),
        ([[1, 2]], TokenPrompt([1, 2])),
        ("", TextPrompt("")),
    ],
)
def test_one_prompt_in_each_shape(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts == (expected,)


def test_several_prompts_of_one_shape() -> None:
    assert completion(prompt=["ok", ""]).prompts == (TextPrompt("ok"), TextPrompt(""))
    assert completion(prompt=[[1], [2, 3]]).prompts == (TokenPrompt([1]), TokenPrompt([2, 3]))


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [[1, 2], "x"], [1, "x"], [1, [1]], [1.5], [True], [None], [[True]], [["x"]], 7, {}, None),
        ["x"] * (MAX_PROMPTS + 1),
    ],
)
def test_b019_b020_prompts_of_a_wrong_shape(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_b019_no_messages() -> None:
    assert refused_param(messages=[]) == "messages"


def test_missing_fields_are_named() -> None:
    for body, param in [(b'{"messages":[{"role":"user","content":"a"}]}', "model"), (b'{"model":"m"}', "messages")]:
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(body)
        assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"model":"m"} x',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)


# Ranges


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63)])
def test_b023_every_int64_is_a_seed(seed: int) -> None:
    assert settle(chat(seed=seed)).seed == seed


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**64, 1.5, "7", True])
def test_b023_anything_else_is_not(seed: object) -> None:
    assert refused_param(seed=seed) == "seed"


def test_b023_no_seed_means_a_random_one() -> None:
    assert settle(chat(seed=None)).seed == SEED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 0),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 2),
    ],
)
def test_b031_numbers_at_the_edge_are_taken_as_they_are(name: str, value: float) -> None:
    assert getattr(settle(chat(**{name: value})), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.01),
        ("top_logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("stream", 1),
        ("cache_salt", 5),
    ],
)
def test_b031_numbers_beyond_the_edge(name: str, value: object) -> None:
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_b031_what_json_has_no_number_for(literal: str) -> None:
    with pytest.raises(InvalidRequest):
        raw_chat(f'"temperature":{literal}')
    with pytest.raises(InvalidRequest):
        raw_chat(f'"logit_bias":{{"5":{literal}}}')


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (V - 1, V - 1), (V, 0), (V + 1, 0), (2**31, 0)]
)
def test_b031_top_k_off(top_k: int, expected: int) -> None:
    assert settle(chat(top_k=top_k)).top_k == expected


@pytest.mark.parametrize("stop", ["", [""], [None], [1], ["a", "b", "c", "d", "e"], "x" * 1_000_000, ["x" * 1_000_000]])
def test_b028_stops(stop: object) -> None:
    assert refused_param(stop=stop) == "stop"


def test_b028_stop_as_text_and_as_list() -> None:
    assert chat(stop="a").stops == chat(stop=["a"]).stops == ("a",)


@pytest.mark.parametrize("n", [0, -1, True, "2", 129, 1.5])
def test_b028_n(n: object) -> None:
    assert refused_param(n=n) == "n"


@pytest.mark.parametrize("ids", [[V], [-1], [2**70], [True], list(range(200))])
def test_b022_stop_token_ids_are_bounded(ids: list[int]) -> None:
    assert refused_param(stop_token_ids=ids) == "stop_token_ids"


def test_stop_ids_unite_the_models_and_the_clients() -> None:
    eos = CARD.eos_ids[0]
    assert settle(chat(stop_token_ids=[5, 7])).stop_ids == (5, 7, eos)
    assert settle(chat(stop_token_ids=[5], ignore_eos=True)).stop_ids == (5,)


def test_min_tokens_above_max_tokens() -> None:
    assert refused_param(min_tokens=6, max_tokens=5) == "min_tokens"


# Context


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(63, 1), (60, 4)])
def test_b024_what_fits(num_prompt: int, max_tokens: int) -> None:
    assert settle(chat(max_tokens=max_tokens), num_prompt).max_tokens == max_tokens


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(64, 1), (64, None), (60, 5), (65, 1), (65, None), (1, 10**9)])
def test_b024_what_does_not(num_prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        settle(chat(max_tokens=max_tokens), num_prompt)
    assert caught.value.code == "context_length_exceeded"
    assert str(num_prompt) in caught.value.message
    assert "64" in caught.value.message


def test_b024_defaults() -> None:
    assert settle(chat(), 60).max_tokens == 4
    assert settle(completion(), 48).max_tokens == 16
    with pytest.raises(ContextLengthExceeded):
        settle(completion(), 60)


def test_b024_two_names_of_the_limit() -> None:
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    assert refused_param(max_tokens=3, max_completion_tokens=4) == "max_completion_tokens"


# Null


CHAT_FIELDS = {
    *ChatRequest.__struct_fields__,
    *CHAT_REFUSED,
    *WITHOUT_EFFECT,
    *ChatParams.__annotations__,
} - {"model", "messages"}
TEXT_FIELDS = {
    *CompletionRequest.__struct_fields__,
    *COMPLETION_REFUSED,
    *WITHOUT_EFFECT,
    *TextParams.__annotations__,
} - {"model", "prompt"}


def test_b026_null_is_absent() -> None:
    """For every field that we or the official client know, one by one and all together."""
    for nulls in [dict.fromkeys(CHAT_FIELDS), *({name: None} for name in CHAT_FIELDS)]:
        assert chat(**nulls) == chat()
        assert settle(chat(**nulls)) == settle(chat())
    for nulls in [dict.fromkeys(TEXT_FIELDS), *({name: None} for name in TEXT_FIELDS)]:
        assert completion(**nulls) == completion()
        assert settle(completion(**nulls)) == settle(completion())
    assert settle(completion(**dict.fromkeys(TEXT_FIELDS))).max_tokens == 16


def test_b026_null_inside_of_fields_is_absent() -> None:
    options = dict.fromkeys(StreamOptions.__struct_fields__)
    assert chat(stream=True, stream_options=options).form == chat(stream=True, stream_options={}).form
    names = set(ChatMessage.__struct_fields__) - {"role", "content"}
    messages = [{"role": "user", "content": "hi"} | dict.fromkeys(names)]
    assert chat(messages=messages).prompts == chat().prompts
    part = {"type": "text", "text": "hi", "refusal": None}
    assert chat(messages=[{"role": "user", "content": [part]}]).prompts == chat().prompts


def test_defaults_come_from_the_card() -> None:
    params = settle(chat())
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)


# What is known but not served


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["audio"]),
        ("best_of", 2),
        ("echo", True),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_args", {"a": 1}),
        ("extra_body", {"chat_template": "x"}),
        ("add_generation_prompt", True),
        ("tokenizer", "x"),
        ("tokenize", False),
        ("documents", []),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_known_fields_without_effect_are_refused(name: str, value: object) -> None:
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": False},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"n": 1},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_usage": False}},
    ],
)
def test_harmless_values_of_known_fields(fields: dict[str, Any]) -> None:
    assert settle(chat(**fields)) == settle(chat())


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, "1", True])
def test_priority_is_a_number(priority: object) -> None:
    assert chat(priority=-3).sampling.priority == -3
    assert refused_param(priority=priority) == "priority"


def test_unknown_stream_option() -> None:
    assert refused_param(stream=True, stream_options={"tokens": True}) == "stream_options.tokens"


def test_unknown_fields_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chat(zebra=1, yak={"a": []}) == chat()
    assert [record.warnings for record in caplog.records] == [["yak", "zebra"]]  # type: ignore[attr-defined]  # an extra


# Chat templates and media


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tokenize", "tokenizer", "add_generation_prompt", "documents", "tools", "x"]
)
def test_b134_template_arguments_have_an_allow_list(name: str) -> None:
    assert refused_param(chat_template_kwargs={name: "x"}) == "chat_template_kwargs"


def test_b134_allowed_template_arguments() -> None:
    (prompt,) = chat(chat_template_kwargs={"enable_thinking": False}).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"enable_thinking": False}
    assert refused_param(chat_template_kwargs={"enable_thinking": {"a": 1}}) == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "x"])
def test_b133_media_are_refused(kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://169.254.169.254/"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
    assert refused_param(messages=messages) == "messages[0].content[1]"
