"""Nothing of a request's state is lost where one worker computes its prompt and another one goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.messages.sampling import SamplingParams
from common.model.checkpoint import open_checkpoint
from common.model.llama import LlamaModel
from common.scheduling.sequence import Sequence
from tests.support.model_driver import ModelDriver
from tests.support.tiny_models import write_tiny_llama

NUM_TOKENS = 12
BLOCK_SIZE = 16
NUM_BLOCKS = 8

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 42, "temperature": 1.0},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.3},
    "frequency penalty": {"temperature": 0.0, "frequency_penalty": 1.0},
    "presence penalty": {"temperature": 0.0, "presence_penalty": 1.0},
    "penalties, seeded": {"seed": 7, "temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 1.0},
    "filters, seeded": {"seed": 7, "temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "min tokens": {"temperature": 0.0, "min_tokens": 6, "stop_ids": tuple(range(0, 320, 2))},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), tie=False, seed=3)
    return LlamaModel.load(open_checkpoint(path), torch.float32, lambda _: None)


def hand_over(sequence: Sequence, source: ModelDriver, target: ModelDriver) -> Sequence:
    """Return the sequence at another worker: the prompt's ids, the first token, and the bytes of the pages."""
    received = target.add(sequence.token_ids[: sequence.num_prompt], sequence.sampling)
    received.token_ids.append(sequence.token_ids[-1])
    for block in sequence.block_ids:
        received.block_ids.append(type(block)(target.free.pop()))
        target.runner._pages[received.block_ids[-1]] = source.runner._pages[block]
    received.num_computed = received.num_prompt
    return received


@pytest.mark.parametrize("length", [1, 17])
@pytest.mark.parametrize("row", ROWS)
def test_b052_every_token_is_that_of_one_worker(model: LlamaModel, row: str, length: int) -> None:
    sampling = SamplingParams(**({"seed": 0, "max_tokens": NUM_TOKENS} | ROWS[row]))
    prompt = torch.randint(320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    alone = ModelDriver(model, BLOCK_SIZE, NUM_BLOCKS)
    (expected,) = alone.generate([alone.add(prompt, sampling)], NUM_TOKENS)
    prefill, decode = ModelDriver(model, BLOCK_SIZE, NUM_BLOCKS, 7), ModelDriver(model, BLOCK_SIZE, NUM_BLOCKS)
    computed = prefill.add(prompt, sampling)
    assert prefill.generate([computed], 1) == [expected[:1]]
    neighbour = decode.add([1, 2, 3], sampling)
    decode.generate([neighbour], 2)
    received = hand_over(computed, prefill, decode)
    assert decode.generate([received, neighbour], NUM_TOKENS)[0] == expected
