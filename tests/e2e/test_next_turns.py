"""The next turn of a conversation over real processes: it comes back to the decode worker that holds its pages, and
only what is new is computed."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.broker.overview import Overview
from common.broker.redis_broker import RedisBroker
from common.messages.codec import pack_ids
from common.messages.ids import ModelName
from common.messages.prefixes import name_prefixes
from common.messages.registry import Role
from tandem.cluster.state import StateDir
from tests.support.cluster import Cluster
from tests.support.observation import Observation, is_idle
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama

MODEL = ModelName("tiny")
BLOCK_SIZE = 16
NUM_PROMPT = 200
NUM_ANSWER = 40
NUM_NEW = 60
TOLD_S = 30.0

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=["auto", "never"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode workers and a prefill worker. What is new of a turn is short: no rate decides."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = write_tiny_llama(folder / "tiny")
    options = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--kv-memory", "64MiB"]
    options += ["--decode", "2", "--disaggregation", request.param, "--canary-interval-s", "600"]
    options += ["--local-prefill-max-tokens", "128"]
    running = Cluster(folder / "state", options).start()
    yield running
    running.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.url) as session:
        yield session


async def complete(client: aiohttp.ClientSession, prompt: list[int], num_tokens: int = NUM_ANSWER) -> dict[str, Any]:
    """Return the ids of an answer and how many tokens of the prompt were cached."""
    fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields}) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def num_computed(client: aiohttp.ClientSession, observation: Observation) -> dict[str, float]:
    """Return how many tokens of prompts each worker has computed."""
    counts: dict[str, float] = {}
    for state in (await observation.overview()).workers:
        async with client.get(f"http://{state.record.metrics_address}/metrics") as response:
            lines = (await response.text()).splitlines()
        (line,) = (line for line in lines if line.startswith("tandem_prefill_tokens_total "))
        counts[state.record.worker] = float(line.split(" ")[1])
    return counts


@pytest.mark.parametrize("first", range(2))
async def test_only_new_tokens_of_the_next_turns_are_computed(
    client: aiohttp.ClientSession, cluster: Cluster, first: int
) -> None:
    history = [100 + first * 7 + number % 89 for number in range(NUM_PROMPT)]
    state = StateDir(cluster.state_dir).read_running()
    assert state is not None
    broker = RedisBroker.connect(state.redis_url, MODEL)
    async with Observation(cluster) as observation:
        await observation.until(is_proved, TOLD_S, "each decode worker has answered its canary")
        num_steps = steps_of(await observation.overview())
        history += (await complete(client, history))["choices"][0]["token_ids"]
        for turn in range(3):
            num_steps += NUM_ANSWER - 1
            # A turn before that goes elsewhere, perhaps: its worker seems to have the last turn's work still.
            await observation.until(have_finished(num_steps), TOLD_S, "the last turn is told to be over")
            num_steps = steps_of(await observation.overview())
            await until_told(broker, history[:-1])  # the last token of an answer was never computed
            num_kept = (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
            prompt = [*history, *(10 + turn + number % 31 for number in range(NUM_NEW))]
            before = await num_computed(client, observation)
            answer = await complete(client, prompt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_kept
            after = await num_computed(client, observation)
            computed = [after[name] - before[name] for name in after if after[name] != before[name]]
            assert computed == [len(prompt) - num_kept]
            history = prompt + answer["choices"][0]["token_ids"]
    await broker.close()


def is_proved(overview: Overview) -> bool:
    """Whether the only canaries of the test are over."""
    decode = [state.load for state in overview.workers if state.record.role is Role.DECODE]
    return len(decode) == 2 and all(load.num_steps > 1 for load in decode) and is_idle(overview)


def steps_of(overview: Overview) -> int:
    """Return how many steps the decode workers have told of."""
    return sum(state.load.num_steps for state in overview.workers if state.record.role is Role.DECODE)


def have_finished(num_steps: int) -> Callable[[Overview], bool]:
    """Return whether the decode workers have told of so many steps, and that nothing is left to do."""
    return lambda overview: steps_of(overview) >= num_steps and is_idle(overview)


async def until_told(broker: RedisBroker, ids: list[int]) -> None:
    """Return when Redis knows that a decode worker holds these tokens."""
    records = [state.record for state in await broker.registry.workers() if state.record.role is Role.DECODE]
    prefixes = name_prefixes(pack_ids(ids), BLOCK_SIZE, records[0].fingerprint, "")
    workers = [(record.worker, record.epoch) for record in records]

    async def is_told() -> bool:
        return max(await broker.prefixes.depths(workers, prefixes)) == len(prefixes.names)

    await until(is_told, "the worker of the last turn has told its prefixes", TOLD_S)
