"""Real processes with the bundled model, used as clients use them: streams, disconnects, load, footprint."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator

import aiohttp
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from common.messages.registry import Role
from tests.support.cluster import Cluster
from tests.support.observation import Observation, worker

MODEL = "smollm2-135m-instruct"
QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
LONG_PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 380
CHUNK_S = 3.0
"""Generous bound of one 256-token chunk deep in a long context on a busy core."""

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two seats, so that a third request queues."""
    options = ["--max-sequences", "2", "--token-budget", "256", "--disaggregation", "always"]
    running = Cluster(tmp_path_factory.mktemp("chat"), options).start()
    yield running
    running.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def observation(cluster: Cluster) -> AsyncIterator[Observation]:
    """A view of the cluster, idle to begin with."""
    async with Observation(cluster) as observation:
        await observation.until_idle(30)
        yield observation


async def test_the_openai_client_completes(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


async def test_a_model_that_knows_no_tools_is_made_to_call_one(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 20}, "year": {"type": "integer", "maximum": 2100}},
        "required": ["country", "year"],
        "additionalProperties": False,
    }
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[{"type": "function", "function": {"name": "find_capital", "parameters": schema}}],
        tool_choice={"type": "function", "function": {"name": "find_capital"}},
        temperature=0,
        max_tokens=100,
        stream=True,
    )
    choices = [chunk.choices[0] async for chunk in stream]
    functions = [call.function for choice in choices for call in choice.delta.tool_calls or [] if call.function]
    arguments = json.loads("".join(function.arguments or "" for function in functions))
    assert functions[0].name == "find_capital"
    assert isinstance(arguments.pop("year"), int)
    assert arguments == {"country": "France"}
    assert choices[-1].finish_reason == "tool_calls"


async def test_the_openai_client_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [8]


async def test_the_prompt_was_prefilled_elsewhere(client: openai.AsyncOpenAI, observation: Observation) -> None:
    before = worker(await observation.overview(), Role.PREFILL).load.num_steps
    await client.completions.create(model=MODEL, prompt="A quite unusual prompt about pelicans. " * 6, max_tokens=2)
    await observation.until(
        lambda overview: worker(overview, Role.PREFILL).load.num_steps > before, 5, "the prefill worker has computed"
    )


async def test_a_disconnect_after_three_chunks_releases_everything(
    client: openai.AsyncOpenAI, observation: Observation
) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count from one to a thousand in words."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = aiter(stream)
    for _ in range(3):
        await anext(chunks)
    await stream.close()
    assert await observation.until_idle(1.0 + CHUNK_S) < 1.0 + CHUNK_S


async def test_a_disconnect_without_streaming_releases_everything(cluster: Cluster, observation: Observation) -> None:
    request = asyncio.create_task(_complete(cluster, "Tell me a long story.", 2000))
    await observation.until(lambda overview: worker(overview, Role.DECODE).load.num_running == 1, 10, "it runs")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await observation.until_idle(1.0 + CHUNK_S)


async def test_a_disconnect_while_queued_releases_everything(cluster: Cluster, observation: Observation) -> None:
    running = [asyncio.create_task(_complete(cluster, f"Story {number}:", 2000)) for number in range(2)]
    await observation.until(lambda overview: worker(overview, Role.DECODE).load.num_running == 2, 20, "both run")
    queued = asyncio.create_task(_complete(cluster, "Story 3:", 2000))
    await observation.until(lambda overview: overview.num_waiting_jobs == 1, 10, "the third one waits")
    queued.cancel()
    await observation.until(lambda overview: overview.num_waiting_jobs == 0, 1.0, "its place is free")
    for request in running:
        request.cancel()
    await asyncio.gather(queued, *running, return_exceptions=True)
    await observation.until_idle(1.0 + CHUNK_S)


async def test_a_disconnect_during_prefill_releases_everything(cluster: Cluster, observation: Observation) -> None:
    request = asyncio.create_task(_complete(cluster, LONG_PROMPT, 10))
    await observation.until(lambda overview: worker(overview, Role.PREFILL).load.num_running == 1, 10, "it prefills")
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await observation.until_idle(1.0 + CHUNK_S)


async def test_a_queued_request_runs_when_a_seat_is_free(cluster: Cluster, observation: Observation) -> None:
    answers = await asyncio.gather(*(_complete(cluster, f"Number {number} is", 8) for number in range(6)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [8] * 6
    await observation.until_idle(2.0)


async def test_32_streams_finish(cluster: Cluster, observation: Observation) -> None:
    sizes = {"concurrency": 32, "requests": 32, "input-tokens": 128, "output-tokens": 16}
    flags = [flag for name, value in sizes.items() for flag in (f"--{name}", str(value))]
    result = cluster.tandem("bench", "serve", "--url", cluster.url, "--json", *flags, timeout_s=240)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["errors"] == {} or report["errors"] == 0, report
    await observation.until_idle(5.0)


def test_the_gateway_is_small_and_has_no_tensors(cluster: Cluster) -> None:
    process = psutil.Process(cluster.process("gateway-0")["pid"])
    libraries = {mapping.path for mapping in process.memory_maps()}
    assert not [path for path in libraries if "torch" in path or "numpy" in path]
    assert process.memory_info().rss < 150e6


def test_metrics_count_the_requests(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.url}/metrics") as response:
        text = response.read().decode()
    assert 'tandem_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert "tandem_time_to_first_token_seconds_bucket" in text


async def _complete(cluster: Cluster, prompt: str, max_tokens: int) -> dict[str, dict[str, int]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(200)) as response,
    ):
        answer: dict[str, dict[str, int]] = await response.json()
        assert response.status == 200, answer
        return answer
