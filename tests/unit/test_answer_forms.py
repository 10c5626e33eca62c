"""What of an answer a request asks for: how many, which of them, with what beside the text."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.messages.sampling import SamplingParams
from gateway.sampling import settle_sampling
from gateway.validation import MAX_CHOICES_IN_ALL, ValidRequest, parse_chat, parse_completion
from tests.support.tiny_tokenizer import tiny_card

CARD = tiny_card()
V = CARD.vocab_size


def chat(**fields: Any) -> ValidRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(json.dumps(body).encode())


def completion(**fields: Any) -> ValidRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def settle(request: ValidRequest) -> SamplingParams:
    return settle_sampling(request, CARD, 8, seed=1)


def refused_param(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        settle(chat(**fields))
    return caught.value.param


def test_n_and_best_of_count_answers_per_prompt() -> None:
    assert (chat(n=128).form.num_choices, chat(n=128).form.num_generated) == (128, 128)
    form = completion(prompt=["a", "b"], n=2, best_of=3).form
    assert (form.num_choices, form.num_generated) == (2, 3)
    assert settle(completion(n=2, best_of=3)).num_logprobs == 0
    assert settle(completion(n=2, best_of=2)).num_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 10, "n": MAX_CHOICES_IN_ALL // 10 + 1}, "n"),
        ({"prompt": ["x"] * 10, "best_of": MAX_CHOICES_IN_ALL // 10 + 1}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_completion_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_what_a_completion_cannot_ask_for(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_best_of_that_asks_for_nothing_can_be_streamed() -> None:
    assert completion(n=2, best_of=2, stream=True).form.streams


# Logprobs and bias


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_b010_logprobs_of_a_chat(fields: dict[str, Any], expected: int | None) -> None:
    params = settle(chat(**fields))
    assert (params.num_logprobs, params.num_prompt_logprobs) == (expected, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
    ],
)
def test_b010_what_a_chat_cannot_ask_for(fields: dict[str, Any], param: str) -> None:
    assert refused_param(**fields) == param


def test_echo_asks_for_logprobs_of_the_prompt() -> None:
    assert settle(completion(logprobs=3)).num_prompt_logprobs is None
    assert settle(completion(logprobs=3, echo=True)).num_prompt_logprobs == 3
    assert settle(completion(echo=True)).num_prompt_logprobs is None
    nothing = completion(max_tokens=0, echo=True)
    assert nothing.form.hides_tokens
    assert settle(nothing).max_tokens == 1


def test_logit_bias() -> None:
    assert settle(chat(logit_bias={"7": -100, "5": 0.5, "6": 0})).logit_bias == ((5, 0.5), (7, -100.0))


@pytest.mark.parametrize(
    "bias",
    [
        *({str(V): 1}, {"-1": 1}, {"9" * 30: 1}, {"5": 100.5}, {"5": -101}, {"5": True}, {"5": None}, {"5": "1"}),
        *({"x": 1}, {"1.0": 1}, {"+1": 1}, {"": 1}, {"05": 1}, [1], "x", {str(index): 1 for index in range(1025)}),
    ],
)
def test_b022_logit_bias_is_bounded(bias: object) -> None:
    assert refused_param(logit_bias=bias) == "logit_bias"


def test_stream_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_timing": True}
    form = chat(stream=True, stream_options=options).form
    assert (form.includes_usage, form.has_running_usage, form.includes_timing) == (True, True, True)
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).form.has_running_usage
    assert chat(stream=True, stream_options={"include_obfuscation": False}).form == chat(stream=True).form
    assert refused_param(stream=True, stream_options={"include_obfuscation": True}) == (
        "stream_options.include_obfuscation"
    )
