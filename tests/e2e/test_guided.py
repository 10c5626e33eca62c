"""Guided answers of the bundled model, through real processes and the official client."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tests.support.cluster import Cluster

MODEL = "smollm2-135m-instruct"
QUESTION: list[ChatCompletionUserMessageParam] = [
    {"role": "user", "content": "Tell me about a city in France, its population and what it is known for."}
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 20_000_000},
        "known_for": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 3},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "population", "known_for", "is_capital"],
    "additionalProperties": False,
}
MAX_TOKENS = 200

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every prompt is prefilled by a prefill worker."""
    running = Cluster(tmp_path_factory.mktemp("guided"), ["--disaggregation", "always"]).start()
    yield running
    running.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=200) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_match_their_schema(client: openai.AsyncOpenAI, temperature: float) -> None:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
        temperature=temperature,
        seed=7,
        n=3,
        max_tokens=MAX_TOKENS,
        logprobs=True,
        top_logprobs=5,
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(choice.message.content)), choice.message.content
        assert choice.logprobs is not None
        assert choice.logprobs.content
    if temperature:
        assert len({choice.message.content for choice in completion.choices}) == 3


async def test_a_stream_matches_its_regex(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        stream=True,
        temperature=1.0,
        seed=3,
        max_tokens=MAX_TOKENS,
        extra_body={"guided_regex": r"[A-Z][a-z]{2,12}: \d{1,3}(,\d{3}){1,2} people"},
    )
    text, finish = "", None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    assert re.fullmatch(r"[A-Z][a-z]{2,12}: [0-9]{1,3}(,[0-9]{3}){1,2} people", text), text
    assert finish == "stop"


async def test_a_choice_is_one_of_them(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model=MODEL,
        prompt="The capital of France is",
        extra_body={"structured_outputs": {"choice": [" Berlin", " Paris"]}, "ignore_eos": True},
        temperature=0,
    )
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (" Paris", "stop")


async def test_a_grammar_that_cannot_be_compiled_is_an_error_of_the_client(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"guided_regex": "["})
    assert (refusal.value.code, refusal.value.param) == ("invalid_grammar", "guided_regex")
