"""The first steps of an engine run the model, and leave nothing behind that a request could meet."""

from pathlib import Path

import pytest
import torch

from common.model.batch import ForwardBatch
from common.model.checkpoint import open_checkpoint
from common.model.llama import LlamaModel
from common.runtime.warm_up import warm_up
from tests.support.model_driver import ModelDriver
from tests.support.tiny_models import write_tiny_llama

PROMPT = [5, 6, 7, 8] * 9
BLOCK_SIZE = 16
CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), tie=False, seed=3)
    return LlamaModel.load(open_checkpoint(path), torch.float32, lambda _: None)


def steps_of(driver: ModelDriver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list that grows by the lengths of queries and contexts of every step."""
    steps: list[tuple[list[int], list[int]]] = []
    forward = driver.probe.forward

    def note(batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        steps.append((list(batch.query_lengths), list(batch.context_lengths)))
        return forward(batch, pages)

    monkeypatch.setattr(driver.probe, "forward", note)
    return steps


def test_a_prompt_of_two_blocks_and_a_token_behind_it_are_computed(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ModelDriver(model, BLOCK_SIZE)
    steps = steps_of(driver, monkeypatch)
    warm_up(driver.runner, BLOCK_SIZE, CONTEXT)
    assert steps == [([17], [17]), ([1], [18])]
    assert driver.probe.logits.isfinite().all()


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17])
def test_a_short_context_is_not_exceeded(model: LlamaModel, monkeypatch: pytest.MonkeyPatch, context: int) -> None:
    driver = ModelDriver(model, BLOCK_SIZE, num_blocks=-(-context // BLOCK_SIZE))
    steps = steps_of(driver, monkeypatch)
    warm_up(driver.runner, BLOCK_SIZE, context)
    assert steps[-1][1] == [context]


def test_answers_are_the_same_behind_it(model: LlamaModel) -> None:
    cold, warm = ModelDriver(model, BLOCK_SIZE), ModelDriver(model, BLOCK_SIZE)
    warm_up(warm.runner, BLOCK_SIZE, CONTEXT)
    assert warm.generate([warm.add(PROMPT)], 20) == cold.generate([cold.add(PROMPT)], 20)
