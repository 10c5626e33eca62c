"""Several choices of one prompt by a real model: each is what it would be alone, and the prompt is computed once."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from common.model.checkpoint import open_checkpoint
from common.model.llama import LlamaModel
from common.runtime.runner import ModelRunner
from common.scheduling.emission import Emission
from common.scheduling.sequence import Sequence
from decode_worker.first_token import FirstToken
from decode_worker.scheduler import DecodeScheduler
from decode_worker.ticket import Intake
from prefill_worker.scheduler import PrefillScheduler
from tests.support.model_driver import poisoned_pages
from tests.support.sequences import key
from tests.support.tiny_models import write_tiny_llama

BLOCK_SIZE = 16
NUM_BLOCKS = 24
CHUNK_SIZE = 8
NUM_TOKENS = 12
NUM_CHOICES = 3

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 42, "temperature": 1.0},
    "penalties, seeded": {"seed": 7, "temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 1.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), tie=False, seed=3)
    return LlamaModel.load(open_checkpoint(path), torch.float32, lambda _: None)


class Worker:
    """The memory and the scheduler of one decode worker."""

    def __init__(self, model: LlamaModel) -> None:
        self.pages = poisoned_pages(model, NUM_BLOCKS, BLOCK_SIZE)
        self.runner = ModelRunner(model, self.pages, BLOCK_SIZE)
        self.pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "f")
        self.scheduler = DecodeScheduler(
            self.pool,
            self.prefix,
            block_size=BLOCK_SIZE,
            max_sequences=8,
            token_budget=32,
            chunk_size=CHUNK_SIZE,
            max_context=256,
        )
        self.told: list[Emission] = []
        self.num_computed = 0

    def run(self) -> None:
        """Run until everybody has ended."""
        while self.scheduler.num_running + self.scheduler.num_waiting:
            self.scheduler.admit()
            plan = self.scheduler.plan()
            self.told += self.scheduler.settle(plan, self.runner.run(plan))
            self.num_computed += plan.num_tokens

    def tokens(self) -> dict[int, list[int]]:
        """Return what was told of each choice."""
        answers: dict[int, list[int]] = defaultdict(list)
        for emission in self.told:
            answers[emission.key.choice] += emission.token_ids
        return answers

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return the logprobs of each choice."""
        found: dict[int, list[TokenLogprobs]] = defaultdict(list)
        for emission in self.told:
            found[emission.key.choice] += emission.logprobs
        return found


def make_sequence(prompt: list[int], choice: int, row: str, *, scores_prompt: bool) -> Sequence:
    controls = {"seed": 0, "max_tokens": NUM_TOKENS, "num_logprobs": 3} | ROWS[row]
    sampling = SamplingParams(**controls, num_prompt_logprobs=2 if scores_prompt else None)
    return Sequence(key("r", choice), list(prompt), len(prompt), sampling, arrival=0)


def alone(model: LlamaModel, prompt: list[int], choice: int, row: str) -> Worker:
    """Compute one choice as a request of its own."""
    worker = Worker(model)
    worker.scheduler.add(make_sequence(prompt, choice, row, scores_prompt=True))
    worker.run()
    return worker


def prefill(model: LlamaModel, worker: Worker, leader: Sequence) -> FirstToken:
    """Compute the leader's prompt in another pool, and bring its pages."""
    pages = poisoned_pages(model, NUM_BLOCKS, BLOCK_SIZE)
    runner = ModelRunner(model, pages, BLOCK_SIZE)
    pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
    scheduler = PrefillScheduler(
        pool, PrefixCache(pool, BLOCK_SIZE, "f"), block_size=BLOCK_SIZE, token_budget=CHUNK_SIZE, chunk_size=CHUNK_SIZE
    )
    computed = Sequence(leader.key, list(leader.token_ids), leader.num_prompt, leader.sampling, arrival=0)
    scheduler.add(computed)
    while True:
        plan = scheduler.plan()
        (progress,) = scheduler.settle(plan, runner.run(plan))
        if progress.token is not None:
            break
    for source, target in zip(computed.block_ids, leader.block_ids, strict=True):
        worker.pages[target] = pages[source]
    return FirstToken(progress.token, progress.num_cached, progress.logprobs, progress.prompt_logprobs)


def are_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> bool:
    numbers = [[each.logprob, *(number for _, number in each.top)] for each in found]
    wanted = [[each.logprob, *(number for _, number in each.top)] for each in expected]
    ids = [[token for token, _ in each.top] for each in found]
    assert ids == [[token for token, _ in each.top] for each in expected]
    return torch.allclose(torch.tensor(numbers), torch.tensor(wanted), atol=1e-4)


@pytest.mark.parametrize("where", list(Intake))
@pytest.mark.parametrize("length", [1, 16, 21, 33])
@pytest.mark.parametrize("row", ROWS)
def test_b063_each_choice_is_what_it_would_be_alone(model: LlamaModel, row: str, length: int, where: Intake) -> None:
    prompt = torch.randint(320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    expected = [alone(model, prompt, choice, row) for choice in range(NUM_CHOICES)]
    worker = Worker(model)
    leader, *followers = [make_sequence(prompt, c, row, scores_prompt=c == 0) for c in range(NUM_CHOICES)]
    worker.scheduler.add(leader, where, followers)
    num_prefilled = 0
    if where is Intake.REMOTE:
        assert worker.scheduler.admit().reserved == (leader,)
        first = worker.scheduler.activate(leader.key, prefill(model, worker, leader))
        assert first is not None
        worker.told.append(first)
        num_prefilled = length
    worker.run()
    assert worker.tokens() == {c: expected[c].tokens()[c] for c in range(NUM_CHOICES)}
    assert worker.num_computed + num_prefilled == length + (NUM_CHOICES - 1) + NUM_CHOICES * (NUM_TOKENS - 1)
    for choice in range(NUM_CHOICES):
        assert are_close(worker.logprobs()[choice], expected[choice].logprobs()[choice])
    of_prompt = list(worker.told[0].prompt_logprobs)
    assert len(of_prompt) == length - 1
    assert length == 1 or are_close(of_prompt, list(expected[0].told[0].prompt_logprobs))
    assert not any(emission.prompt_logprobs for emission in worker.told[1:])
    assert worker.pool.num_free == NUM_BLOCKS
    assert worker.scheduler.violations() == []


def test_choices_of_a_seeded_request_differ_and_those_of_a_greedy_one_do_not(model: LlamaModel) -> None:
    prompt = [5, 6, 7, 8]
    for row, num_different in (("greedy", 1), ("seeded", NUM_CHOICES)):
        answers = {tuple(alone(model, prompt, choice, row).tokens()[choice]) for choice in range(NUM_CHOICES)}
        assert len(answers) == num_different
