"""The native model gives the same bits however the work is cut, batched, split between pools and spread on threads."""

from pathlib import Path

import pytest
import torch

from common.model.checkpoint import open_checkpoint
from common.model.native_llama import NativeLlama
from kernels.native.library import open_library
from tests.support import model_paths
from tests.support.model_driver import ModelDriver
from tests.support.model_paths import AnyLlama, ModelPath
from tests.support.tiny_models import write_tiny_llama

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not model_paths.NATIVE, reason="native kernels are made for x86-64 with AVX2 on Linux"),
]

NUM_TOKENS = 40
PROMPT_LENGTHS = (70, 1, 33)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), attention_bias=True, hidden=96, heads=6, kv_heads=2)


@pytest.fixture(scope="module", params=model_paths.NATIVE, ids=str)
def way(request: pytest.FixtureRequest) -> ModelPath:
    selected: ModelPath = request.param
    return selected


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    selected: torch.dtype = request.param
    return selected


@pytest.fixture(scope="module")
def model(tiny: Path, way: ModelPath, dtype: torch.dtype) -> AnyLlama:
    return way.load(open_checkpoint(tiny), dtype)


def decoded(driver: ModelDriver, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that follow `prompt` and the logits [num_tokens, vocab] that they were the largest of."""
    sequence = driver.add(prompt)
    logits = []
    while sequence.num_generated < NUM_TOKENS:
        num_generated = sequence.num_generated
        driver.step([sequence])
        if sequence.num_generated > num_generated:
            logits.append(driver.probe.logits[0])
    return sequence.token_ids[sequence.num_prompt :], torch.stack(logits)


def test_any_chunking_gives_the_same_bits(model: AnyLlama) -> None:
    prompt = random_ids(70)
    tokens, logits = decoded(ModelDriver(model), prompt)
    for chunk_size, block_size in ((1, 16), (7, 8), (16, 16), (33, 32)):
        cut = decoded(ModelDriver(model, chunk_size=chunk_size, block_size=block_size), prompt)
        assert cut[0] == tokens
        assert torch.equal(cut[1], logits)


def test_neighbours_change_nothing(model: AnyLlama) -> None:
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    alone = [decoded(ModelDriver(model), prompt)[0] for prompt in prompts]
    for chunk_size in (5, 512):
        driver = ModelDriver(model, chunk_size=chunk_size)
        assert driver.generate([driver.add(prompt) for prompt in prompts], NUM_TOKENS) == alone


def test_split_between_two_pools_gives_the_same_bits(model: AnyLlama) -> None:
    """One computes the prompt, the other goes on from a copy of its pages."""
    prompt = random_ids(50)
    tokens, logits = decoded(ModelDriver(model), prompt)
    prefill, decode = ModelDriver(model, chunk_size=16), ModelDriver(model)
    leader = prefill.add(prompt)
    while not leader.num_generated:
        prefill.step([leader])
    follower = decode.add(prompt)
    follower.token_ids.append(leader.token_ids[-1])
    follower.block_ids = [decode.free.pop() for _ in leader.block_ids]  # type: ignore[misc] # a BlockId is an int
    follower.num_computed = len(prompt)
    decode.pages[torch.tensor(follower.block_ids)] = prefill.pages[torch.tensor(leader.block_ids)]
    for expected in logits[1:]:
        decode.step([follower])
        assert torch.equal(decode.probe.logits[0], expected)
    assert follower.token_ids[len(prompt) :] == tokens


def test_threads_change_no_bit(tiny: Path, dtype: torch.dtype) -> None:
    prompt = random_ids(90)
    for one, two in zip(model_paths.NATIVE[::2], model_paths.NATIVE[1::2], strict=True):
        assert one.isa is two.isa
        tokens, logits = decoded(ModelDriver(one.load(open_checkpoint(tiny), dtype)), prompt)
        again = decoded(ModelDriver(two.load(open_checkpoint(tiny), dtype)), prompt)
        assert again[0] == tokens
        assert torch.equal(again[1], logits)


def test_shared_weights_are_those_of_the_first(tiny: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The second needs no tensor of the checkpoint."""
    way = model_paths.NATIVE[1]
    alone = decoded(ModelDriver(way.load(open_checkpoint(tiny), dtype)), random_ids(20))
    assert way.isa is not None
    library = open_library(way.isa)
    assert library is not None

    def share(checkpoint: object) -> NativeLlama:
        return NativeLlama.load(
            checkpoint,  # type: ignore[arg-type]
            dtype,
            lambda _: None,
            num_threads=1,
            library=library,
            is_shared=True,
            folder=tmp_path,
        )

    first = share(open_checkpoint(tiny))
    checkpoint = open_checkpoint(tiny)

    class Unread:
        config = checkpoint.config
        model_hash = staticmethod(checkpoint.model_hash)

    second = share(Unread())
    for model in (first, second):
        assert model.memory.is_shared
        tokens, logits = decoded(ModelDriver(model), random_ids(20))
        assert tokens == alone[0]
        assert torch.equal(logits, alone[1])
    first.close()
    assert len(list(tmp_path.iterdir())) == 1
    second.close()
    assert not list(tmp_path.iterdir())
