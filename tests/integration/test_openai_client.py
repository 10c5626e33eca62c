"""The official client of the OpenAI API against a real server."""

from collections.abc import AsyncIterator

import openai
import pytest

from common.errors import WorkerLost
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Step, Stop
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
