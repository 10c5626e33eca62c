"""Every topology gives the tokens that `transformers` gives: local, remote over shared memory, remote over TCP; any
chunk size and block size; alone and in a batch. Real processes, real Redis, the bundled model in fp32.

By default a covering fifth of the combinations runs; TANDEM_MATRIX=full runs all of them.
"""

import asyncio
import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers

from common.messages.ids import Fingerprint, ModelName
from common.model.card import build_card
from common.model.checkpoint import open_checkpoint
from common.model.locate import locate_model
from tests.support import reference
from tests.support.cluster import Cluster

MAX_TOKENS = 10
SEEDED_TOKENS = 24
LONG_TEXT = "The river runs past the old mill, and every spring the children count the boats that come down with it. "
TEXTS = {
    "english": "The three primary colours are",
    "question": "What is the capital of France? Answer:",
    "list": "Monday, Tuesday, Wednesday,",
    "story": "Once upon a time, in a village by the sea, there lived",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "json": '{"name": "Ada", "born": 1815, "fields": [',
    "chinese": "北京是中国的首都",
    "mixed": "Translate to French: 猫 means cat, and cat means",
    "emoji": "I love 🍕 and 👩‍🚀, but most of all",
    "digits": "3.14159 26535 89793",
    "spaces": "a    b\t\tc\n\n\nd",
    "accents": "Où est la bibliothèque? Elle est à côté de l'école, près du café",
}
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 1500)


@dataclass(frozen=True)
class Topology:
    """One way to run the same request."""

    path: str
    chunk_size: int
    block_size: int
    kernels: str

    @property
    def options(self) -> list[str]:
        """Flags of `tandem up`."""
        way = ["--disaggregation", "never"] if self.path == "local" else ["--disaggregation", "always"]
        transfer = ["--transfer", self.path] if self.path != "local" else []
        sizes = ["--chunk-size", str(self.chunk_size), "--block-size", str(self.block_size)]
        return ["--dtype", "float32", "--max-context", "2048", "--kernels", self.kernels, *way, *transfer, *sizes]


ALL = [Topology(*each) for each in itertools.product(("local", "shm", "tcp"), (7, 512), (8, 16), ("native", "torch"))]
COVERING = [
    Topology("local", 512, 16, "native"),
    Topology("local", 7, 8, "torch"),
    Topology("shm", 7, 16, "native"),
    Topology("shm", 512, 8, "torch"),
    Topology("tcp", 512, 16, "native"),
]
TOPOLOGIES = ALL if os.environ.get("TANDEM_MATRIX") == "full" else COVERING

pytestmark = [pytest.mark.golden, pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """The bundled model's tokenizer, as gateways get it."""
    checkpoint = open_checkpoint(locate_model("smollm2"))
    card = build_card(checkpoint, model=ModelName("m"), fingerprint=Fingerprint("f"), max_context=2048, created=0)
    return tokenizers.Tokenizer.from_str(zlib.decompress(card.tokenizer).decode())


@pytest.fixture(scope="module")
def prompts(tokenizer: tokenizers.Tokenizer) -> dict[str, list[int]]:
    """20 prompts as token ids."""
    texts = {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in TEXTS.items()}
    long_ids = tokenizer.encode(LONG_TEXT * 100, add_special_tokens=False).ids
    return texts | {f"length-{length}": long_ids[:length] for length in LENGTHS}


@pytest.fixture(scope="module")
def expected(prompts: dict[str, list[int]], tokenizer: tokenizers.Tokenizer) -> dict[str, tuple[str, int]]:
    """Text and number of tokens that `transformers` generates."""
    answers = {name: reference.generate(ids, MAX_TOKENS) for name, ids in prompts.items()}
    return {
        name: (tokenizer.decode(list(answer.ids)), len(answer.ids) + answer.is_stopped)
        for name, answer in answers.items()
    }


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=str)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster of that topology."""
    state_dir: Path = tmp_path_factory.mktemp("cluster")
    running = Cluster(state_dir, request.param.options).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def seeded() -> dict[str, str]:
    """Seeded answers of the first topology, which all others must repeat."""
    return {}


async def _answer(session: aiohttp.ClientSession, url: str, ids: list[int], **fields: object) -> dict[str, Any]:
    body = {"model": "smollm2-135m-instruct", "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0} | fields
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def _complete(session: aiohttp.ClientSession, url: str, ids: list[int], **fields: object) -> tuple[str, int]:
    answer = await _answer(session, url, ids, **fields)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


async def test_greedy_equals_transformers_alone(
    cluster: Cluster, prompts: dict[str, list[int]], expected: dict[str, tuple[str, int]]
) -> None:
    async with aiohttp.ClientSession() as session:
        answers = {name: await _complete(session, cluster.url, ids) for name, ids in prompts.items()}
    assert answers == expected


async def test_greedy_equals_transformers_in_a_batch(
    cluster: Cluster, prompts: dict[str, list[int]], expected: dict[str, tuple[str, int]]
) -> None:
    names = [name for name in prompts if name != "length-1500"][:16]
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(_complete(session, cluster.url, prompts[name]) for name in names))
    assert dict(zip(names, answers, strict=True)) == {name: expected[name] for name in names}


async def test_seeded_sampling_is_the_same_everywhere(
    cluster: Cluster, prompts: dict[str, list[int]], seeded: dict[str, str]
) -> None:
    names = ["english", "code", "length-33"]
    fields = {"temperature": 0.8, "seed": 42, "max_tokens": SEEDED_TOKENS}
    async with aiohttp.ClientSession() as session:
        alone = [(await _complete(session, cluster.url, prompts[name], **fields))[0] for name in names]
        together = await asyncio.gather(
            *(_complete(session, cluster.url, prompts[name], **fields) for name in names for _ in range(2))
        )
    assert [text for text, _ in together] == [text for text in alone for _ in range(2)]
    for name, text in zip(names, alone, strict=True):
        assert text == seeded.setdefault(name, text)


async def test_logprobs_of_answer_and_prompt(
    cluster: Cluster, prompts: dict[str, list[int]], expected: dict[str, tuple[str, int]]
) -> None:
    """The same numbers wherever the prompt is computed, cached (it was computed before) or not."""
    names = ["english", "chinese", "length-1", "length-33"]
    asked = {"logprobs": 5, "echo": True}
    async with aiohttp.ClientSession() as session:
        for name in names * 2:
            (choice,) = (await _answer(session, cluster.url, prompts[name], **asked))["choices"]
            ids = prompts[name] + list(reference.generate(prompts[name], MAX_TOKENS).ids)
            known = reference.logprobs(ids)
            first, *numbers = choice["logprobs"]["token_logprobs"][: len(ids)]
            assert first is None
            assert numbers == pytest.approx([float(known[at, token]) for at, token in enumerate(ids[1:])], abs=1e-3)
            tops = choice["logprobs"]["top_logprobs"][1 : len(ids)]
            best = [max(top.values()) for top in tops]
            assert best == pytest.approx(known[:-1].amax(-1).tolist(), abs=1e-3)
            assert choice["text"].endswith(expected[name][0])


async def test_the_path_was_the_one_asked_for(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    topology = request.node.callspec.params["cluster"]
    steps = cluster.process("prefill-0")["steps"]
    assert (steps == 0) == (topology.path == "local")
