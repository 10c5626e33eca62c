"""Choices, logprobs, echo, batches and bias of the bundled model with the official client: the same answers whether the
prompt was prefilled by a prefill worker or where it is decoded."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionUserMessageParam

from tests.support.cluster import Cluster

MODEL = "smollm2-135m-instruct"
QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Name three colours of the rainbow."}]
LOGPROB_TOLERANCE = 2e-2
"""Between two ways to cut a prompt into chunks, in the precision that the model is served in."""

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["always", "never"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """The official client of a cluster that always, or never, hands prompts over."""
    running = Cluster(tmp_path_factory.mktemp(request.param), ["--disaggregation", request.param]).start()
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made
    running.stop()


ANSWERS: dict[str, Any] = {}
"""What the first cluster has answered, by test."""


def agree(test: str, answer: ChatCompletion | Completion) -> None:
    """Compare with the other cluster's answer; the first one is kept."""
    texts = [choice.message.content if hasattr(choice, "message") else choice.text for choice in answer.choices]
    told = (texts, [choice.finish_reason for choice in answer.choices], logprobs_of(answer))
    first = ANSWERS.setdefault(test, told)
    assert told[:2] == first[:2]
    assert told[2] == pytest.approx(first[2], abs=LOGPROB_TOLERANCE)


def logprobs_of(answer: ChatCompletion | Completion) -> list[float]:
    if isinstance(answer, Completion):
        lists = [choice.logprobs.token_logprobs or [] for choice in answer.choices if choice.logprobs is not None]
        return [logprob for logprobs in lists for logprob in logprobs if logprob is not None]
    contents = [choice.logprobs.content or [] for choice in answer.choices if choice.logprobs is not None]
    return [entry.logprob for content in contents for entry in content]


def test_seeded_choices_differ_and_streams_agree_with_whole_answers(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 7, "max_tokens": 12}
    fields |= {"temperature": 1.0}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=4)
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert choice.logprobs is not None
        for entry in choice.logprobs.content or []:
            top = [other.logprob for other in entry.top_logprobs]
            assert top == sorted(top, reverse=True)
            assert top[0] >= entry.logprob
    texts = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]
    agree("choices", whole)


def test_a_batch_echoes_its_prompts_with_their_logprobs(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One two three four", "One two three"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, echo=True, logprobs=3, max_tokens=4, temperature=0
    )
    for index, choice in enumerate(answer.choices):
        assert choice.index == index
        assert choice.text.startswith(prompts[index // 2])
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert "".join(tokens) == choice.text
        assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
        assert (choice.logprobs.token_logprobs or [0])[0] is None
    agree("batch", answer)


def test_a_prompt_alone_has_the_logprobs_that_it_has_before_an_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "One two three four five six", "echo": True, "logprobs": 0}
    alone = client.completions.create(**fields, max_tokens=0)
    before = client.completions.create(**fields, max_tokens=3, temperature=0)
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    known = logprobs_of(alone)
    assert known == pytest.approx(logprobs_of(before)[: len(known)], abs=LOGPROB_TOLERANCE)
    agree("alone", alone)


def test_a_banned_token_does_not_come_and_a_wanted_one_does(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 3}
    usual = client.completions.create(**fields, extra_body={"return_token_ids": True})
    ids = (usual.choices[0].model_extra or {})["token_ids"]
    banned = client.completions.create(**fields, logit_bias={str(ids[0]): -100}, extra_body={"return_token_ids": True})
    assert ids[0] not in (banned.choices[0].model_extra or {})["token_ids"]
    wanted = client.completions.create(**fields, logit_bias={str(ids[1]): 100}, extra_body={"return_token_ids": True})
    assert (wanted.choices[0].model_extra or {})["token_ids"] == [ids[1]] * 3
    agree("banned", banned)


def test_the_best_of_several_is_likelier_than_they_are_on_average(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Colours:", "seed": 3, "max_tokens": 6, "logprobs": 0}
    best = client.completions.create(**fields, best_of=4)
    every = client.completions.create(**fields, n=4)
    means = [
        sum(choice.logprobs.token_logprobs or []) / len(choice.logprobs.token_logprobs or [0])
        for choice in every.choices
        if choice.logprobs is not None
    ]
    likeliest = every.choices[means.index(max(means))]
    assert best.choices[0].text == likeliest.text
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    agree("best", best)


def test_where_the_time_went(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=4, extra_headers={"x-tandem-timing": "true"}
    )
    timing = answer.http_response.json()["timing"]
    assert timing.keys() >= {"queue_s", "wait_s", "prefill_s", "decode_s", "ttft_s", "total_s"}
    assert timing["prefill_s"] > 0
    assert timing["queue_s"] + timing["wait_s"] + timing["prefill_s"] + timing["decode_s"] <= timing["total_s"] + 0.1
    assert "decode;dur=" in answer.headers["server-timing"]


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    sampling: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "extra_body": {"seed": 7}}
    chat = client.chat.completions.create(**sampling, messages=QUESTION, max_tokens=12)
    asked: dict[str, Any] = {**sampling, "input": str(QUESTION[0]["content"]), "max_output_tokens": 12}
    whole = client.responses.create(**asked, include=["message.output_text.logprobs"])
    with client.responses.stream(**asked) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert whole.output_text == streamed == chat.choices[0].message.content
    assert (whole.status, chat.choices[0].finish_reason) == ("incomplete", "length")
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    agree("response", chat)


def test_tokens_are_those_of_the_prompt(client: openai.OpenAI) -> None:
    root = str(client.base_url).removesuffix("v1/")
    tokenized = client.post(f"{root}tokenize", body={"model": MODEL, "messages": QUESTION}, cast_to=dict[str, Any])
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert chat.usage is not None
    assert tokenized["count"] == len(tokenized["tokens"]) == chat.usage.prompt_tokens
    text = client.post(
        f"{root}detokenize", body={"model": MODEL, "tokens": tokenized["tokens"]}, cast_to=dict[str, Any]
    )
    assert str(QUESTION[0]["content"]) in text["prompt"]
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="a")


PARAMETERS: dict[str, dict[str, Any]] = {
    "ignore_eos": {"max_completion_tokens": 6, "extra_body": {"ignore_eos": True, "min_tokens": 6}},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    "filters": {"temperature": 1.0, "top_p": 0.9, "seed": 5, "user": "me", "extra_body": {"top_k": 20, "min_p": 0.05}},
    "shares": {"extra_body": {"cache_salt": "mine", "priority": 1}},
    "stop": {"stop": ["e", "\n"]},
    "regex": {"extra_body": {"guided_regex": "(red|green), (red|blue)"}},
    "json": {"response_format": {"type": "json_object"}},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, name: str) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 8}
    fields |= PARAMETERS[name]
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    agree(name, whole)
