"""The official client of the OpenAI API against a real server."""

from collections.abc import AsyncIterator

import openai
import pytest

from common.errors import WorkerLost
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.scripted_engine import Say, ScriptedEngine, Step, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
SCRIPT: list[Step] = [*byte_ids(TOKENIZER, "hello 日本"), Stop()]
HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play(list(SCRIPT))
    async with running_gateway(engine, ping_interval_s=0.05) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "hello 日本"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(SCRIPT) - 1


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello 日本"
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_completion_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="tiny", prompt="hi", max_tokens=40)
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=40, stream=True)
    assert whole.choices[0].text == "hello 日本"
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_errors_have_their_own_types(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=HI, top_p=2)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=HI)
    gateway.engine.play([*byte_ids(TOKENIZER, "he"), WorkerLost("the worker is gone")])
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="the worker is gone"):
        async for _ in stream:
            pass


# Several choices, logprobs


async def test_choices_with_logprobs(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    ids = byte_ids(TOKENIZER, "日b")
    script: list[Step] = [*(Say(index, tuple(ids)) for index in (1, 0)), Stop(choice=1), Stop()]
    gateway.engine.play(script)
    answer = await client.chat.completions.create(model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=3)
    for index, choice in enumerate(answer.choices):
        assert (choice.index, choice.message.content) == (index, "日b")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content) == "日b".encode()
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {3}


async def test_a_batch_with_echo_and_logprobs(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    gateway.engine.play([(5,), Stop()])
    answer = await client.completions.create(model="tiny", prompt=["ab", "c"], echo=True, logprobs=2, max_tokens=1)
    assert [choice.text for choice in answer.choices] == [text + TOKENIZER.decode([5]) for text in ("ab", "c")]
    for choice, num_tokens in zip(answer.choices, (3, 2), strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == num_tokens
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


async def test_timing_is_there_for_who_asks(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HI, extra_headers={"x-tandem-timing": "true"})
    assert answer.model_extra is not None
    assert answer.model_extra["timing"]["total_s"] > 0
