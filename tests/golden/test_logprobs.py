"""Logprobs of generated tokens and of prompts are the log-softmax of what `transformers` computes, however the work is
cut, batched, and split between two pools; and what else a step does beside its tokens."""

import math
from collections.abc import Sequence as Several
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import GrammarViolated
from common.messages.ids import BlockId, ChoiceIndex
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from common.model.checkpoint import open_checkpoint
from common.runtime import scoring
from common.runtime.runner import ModelRunner, copy_pages
from common.scheduling.plan import BlockCopy, Chunk, StepPlan
from common.scheduling.sequence import Sequence
from kernels.sampling import reference
from tests.support import model_paths
from tests.support.model_driver import GREEDY, ModelDriver
from tests.support.model_paths import AnyLlama, ModelPath
from tests.support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.golden

NUM_TOP = 5
SCORED = msgspec.structs.replace(GREEDY, num_logprobs=NUM_TOP, num_prompt_logprobs=NUM_TOP)
PROMPT_LENGTHS = (1, 2, 16, 17, 150)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), tie=False, seed=3)


@pytest.fixture(scope="module", params=model_paths.ALL, ids=str)
def model(tiny: Path, request: pytest.FixtureRequest) -> AnyLlama:
    """Computed in each way in turn."""
    way: ModelPath = request.param
    return way.load(open_checkpoint(tiny))


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Expected:
    """What `transformers` says of a sequence: its logits [num_tokens, vocab]."""

    def __init__(self, path: Path, sequence: Sequence) -> None:
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.inference_mode():
            self._logits: torch.Tensor = theirs(torch.tensor([sequence.token_ids])).logits[0]
        self._sequence = sequence

    def check_prompt(self, logprobs: Several[TokenLogprobs]) -> None:
        assert len(logprobs) == self._sequence.num_prompt - 1
        self._check(1, logprobs)

    def check_generated(self, logprobs: Several[TokenLogprobs]) -> None:
        assert len(logprobs) == self._sequence.num_generated
        self._check(self._sequence.num_prompt, logprobs)

    def _check(self, first: int, logprobs: Several[TokenLogprobs]) -> None:
        for position, ours in enumerate(logprobs, start=first):
            token = self._sequence.token_ids[position]
            logprob, top = reference.logprobs(self._logits[position - 1], token, len(ours.top))
            assert ours.logprob == pytest.approx(logprob, abs=1e-4)
            assert [number for _, number in ours.top] == pytest.approx([number for _, number in top], abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in top]
            assert len(ours.top) == NUM_TOP


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 512])
def test_alone(model: AnyLlama, tiny: Path, chunk_size: int) -> None:
    for length in PROMPT_LENGTHS:
        driver = ModelDriver(model, chunk_size=chunk_size)
        sequence = driver.add(random_ids(length, seed=length), SCORED)
        driver.generate([sequence], NUM_TOKENS)
        expected = Expected(tiny, sequence)
        expected.check_prompt(sequence.prompt_logprobs)
        expected.check_generated(driver.logprobs[sequence.key])


@pytest.mark.parametrize("chunk_size", [7, 512])
def test_beside_others_that_ask_for_less(model: AnyLlama, tiny: Path, chunk_size: int) -> None:
    driver = ModelDriver(model, chunk_size=chunk_size)
    asking = [SCORED, GREEDY, msgspec.structs.replace(SCORED, num_prompt_logprobs=None), SCORED]
    sequences = [driver.add(random_ids(20 * index + 5, seed=index), params) for index, params in enumerate(asking)]
    driver.generate(sequences[2:], 3)
    driver.generate(sequences, NUM_TOKENS)
    for sequence in sequences:
        if sequence.sampling.num_prompt_logprobs is None:
            assert sequence.prompt_logprobs == []
        else:
            Expected(tiny, sequence).check_prompt(sequence.prompt_logprobs)
        if sequence.sampling.num_logprobs is None:
            assert driver.logprobs[sequence.key] == []
        else:
            Expected(tiny, sequence).check_generated(driver.logprobs[sequence.key])


def test_split_between_two_pools(model: AnyLlama, tiny: Path) -> None:
    """One computes the prompt and the first token, the other goes on from its pages."""
    first, second = ModelDriver(model, chunk_size=7), ModelDriver(model)
    sequence = first.add(random_ids(37), SCORED)
    first.generate([sequence], 1)
    moved = [BlockId(second.free.pop()) for _ in sequence.block_ids]
    second.pages[torch.tensor(moved)] = first.pages[torch.tensor(sequence.block_ids)]
    sequence.block_ids = moved
    second.generate([sequence], NUM_TOKENS)
    expected = Expected(tiny, sequence)
    expected.check_prompt(sequence.prompt_logprobs)
    expected.check_generated(first.logprobs[sequence.key] + second.logprobs[sequence.key])


def test_after_preemption(model: AnyLlama, tiny: Path) -> None:
    """What is computed again is told once: a prompt that was half scored begins again, a complete one does not."""
    driver = ModelDriver(model, chunk_size=16)
    sequence = driver.add(random_ids(40), SCORED)
    driver.step([sequence])
    driver.preempt(sequence)
    driver.generate([sequence], 3)
    driver.preempt(sequence)
    driver.generate([sequence], NUM_TOKENS)
    expected = Expected(tiny, sequence)
    expected.check_prompt(sequence.prompt_logprobs)
    expected.check_generated(driver.logprobs[sequence.key])


def test_a_long_prompt_is_scored_in_slices(model: AnyLlama, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sliced = ModelDriver(model), ModelDriver(model)
    ids = random_ids(3 * scoring.SLICE_ROWS + 5)
    sequence, again = whole.add(ids, SCORED), sliced.add(ids, SCORED)
    whole.step([sequence])
    assert whole.probe.most_rows == scoring.SLICE_ROWS
    monkeypatch.setattr(scoring, "SLICE_ROWS", 10)
    sliced.step([again])
    assert sliced.probe.most_rows == 10
    for each in (sequence, again):
        Expected(tiny, each).check_prompt(each.prompt_logprobs)


def test_they_are_of_the_raw_logits(model: AnyLlama, tiny: Path) -> None:
    """Whatever decides the token: filters, penalties, bias. None of them makes a number infinite."""
    demanding = msgspec.structs.replace(
        SCORED,
        temperature=0.3,
        top_k=1,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias=tuple((token, -100.0) for token in range(300)),
        stop_ids=(310, 311),
        min_tokens=NUM_TOKENS,
    )
    driver = ModelDriver(model)
    sequence = driver.add(random_ids(20), demanding)
    (tokens,) = driver.generate([sequence], NUM_TOKENS)
    assert min(tokens) >= 300
    Expected(tiny, sequence).check_generated(driver.logprobs[sequence.key])
    assert all(math.isfinite(each.logprob) for each in driver.logprobs[sequence.key])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("chunk_size", [16, 512])
def test_bad_logits_within_a_prompt(model: AnyLlama, value: float, chunk_size: int) -> None:
    driver = ModelDriver(model, chunk_size=chunk_size)
    bad, good = driver.add(random_ids(30), SCORED), driver.add(random_ids(30, seed=1))
    driver.probe.replacements = {5: value}  # of more rows than those that sample
    assert driver.step([bad, good]) == {bad.key}
    assert bad.prompt_logprobs == []
    assert bad.num_generated == 0


def test_each_choice_draws_its_own(model: AnyLlama) -> None:
    sampling = SamplingParams(seed=42, max_tokens=99, temperature=1.5)
    prompt = random_ids(20)

    def answers(choices: Several[int], *, together: bool) -> list[list[int]]:
        driver = ModelDriver(model)
        sequences = [driver.add(prompt, sampling) for _ in choices]
        for sequence, choice in zip(sequences, choices, strict=True):
            sequence.key = sequence.key._replace(choice=ChoiceIndex(choice))
        if together:
            return driver.generate(sequences, NUM_TOKENS)
        return [driver.generate([sequence], NUM_TOKENS)[0] for sequence in sequences]

    several = answers([0, 1, 2], together=True)
    assert len({tuple(answer) for answer in several}) == 3
    assert answers([2, 0, 1], together=False) == [several[2], several[0], several[1]]


class TestCopies:
    def test_a_choice_goes_on_from_copied_pages(self, model: AnyLlama) -> None:
        """Full blocks are shared, the last one is copied; whoever writes into it first, the other does not notice."""
        driver = ModelDriver(model)
        leader = driver.add(random_ids(21))
        (expected,) = driver.generate([leader], 8)
        alone = ModelDriver(model)
        leader = alone.add(random_ids(21))
        alone.generate([leader], 3)
        follower = alone.add(random_ids(21))
        follower.num_computed = 20
        follower.block_ids = [leader.block_ids[0], BlockId(alone.free.pop())]
        copies = (BlockCopy(leader.block_ids[1], follower.block_ids[1]),)
        result = alone.runner.run(StepPlan((Chunk(follower, 20, 1, samples=True),), copies))
        assert list(result.tokens.values()) == expected[:1]
        follower.num_computed = 21
        follower.token_ids.append(expected[0])
        assert alone.generate([follower, leader], 8) == [expected, expected]

    def test_copies_come_before_anything_is_computed(self, model: AnyLlama) -> None:
        """The source is written in the same step."""
        driver = ModelDriver(model)
        first = driver.add(random_ids(18))
        driver.generate([first], 1)
        before = driver.pages[first.block_ids[1]].clone()
        target = BlockId(driver.free.pop())
        chunk = Chunk(first, 18, 1, samples=True)
        driver.runner.run(StepPlan((chunk,), (BlockCopy(first.block_ids[1], target),)))
        torch.testing.assert_close(driver.pages[target], before, equal_nan=True)
        assert not torch.equal(driver.pages[first.block_ids[1]], driver.pages[target])

    def test_whole_pages_and_no_others(self) -> None:
        pages = torch.arange(5.0).reshape(5, 1, 1).repeat(1, 2, 3)
        copy_pages(pages, (BlockCopy(BlockId(4), BlockId(0)), BlockCopy(BlockId(4), BlockId(2))))
        assert pages[:, 1, 2].tolist() == [4.0, 1.0, 4.0, 3.0, 4.0]

    @pytest.mark.parametrize("pairs", [((0, 1), (2, 1)), ((0, 1), (1, 2)), ((1, 1),)])
    def test_copies_that_disturb_each_other_are_refused(self, pairs: tuple[tuple[int, int], ...]) -> None:
        with pytest.raises(AssertionError):
            copy_pages(torch.zeros(3, 1), [BlockCopy(BlockId(source), BlockId(target)) for source, target in pairs])

    def test_a_plan_of_copies_alone_is_refused(self, model: AnyLlama) -> None:
        with pytest.raises(AssertionError, match="copied"):
            ModelDriver(model).runner.run(StepPlan((), (BlockCopy(BlockId(0), BlockId(1)),)))


class EvenTokens:
    """A grammar of even ids that ends its sequence's life at a length."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def allowed(self, sequence: Sequence) -> torch.Tensor | None:
        if sequence.sampling.grammar is None:
            return None
        if sequence.num_generated == self._longest:
            raise GrammarViolated("too long")
        return torch.full((10,), 0x55555555, dtype=torch.int32)


class TestGrammars:
    def test_a_sequence_keeps_to_its_grammar_and_neighbours_do_not_notice(self, model: AnyLlama) -> None:
        free = ModelDriver(model)
        (expected,) = free.generate([free.add(random_ids(12))], 4)
        driver = ModelDriver(model)
        driver.runner = ModelRunner(driver.probe, driver.pages, driver.block_size, EvenTokens(3))
        bound = driver.add(random_ids(12), msgspec.structs.replace(SCORED, grammar="{}"))
        other = driver.add(random_ids(12))
        driver.generate([bound, other], 3)
        assert [token % 2 for token in bound.token_ids[12:]] == [0, 0, 0]
        plan = driver.plan([bound, other])
        result = driver.runner.run(plan)
        assert (*result.violated, len(result.invalid)) == (bound.key, 0)
        assert result.tokens == {other.key: expected[3]}
        assert result.logprobs == {}

    def test_bad_logits_are_told_first(self, model: AnyLlama) -> None:
        driver = ModelDriver(model)
        driver.runner = ModelRunner(driver.probe, driver.pages, driver.block_size, EvenTokens(0))
        bound = driver.add(random_ids(12), msgspec.structs.replace(SCORED, grammar="{}"))
        driver.probe.replacements = {0: torch.nan}
        result = driver.runner.run(driver.plan([bound]))
        assert (*result.invalid, len(result.violated)) == (bound.key, 0)

    def test_a_grammar_that_nobody_follows_is_not_ignored(self, model: AnyLlama) -> None:
        driver = ModelDriver(model)
        bound = driver.add(random_ids(12), msgspec.structs.replace(GREEDY, grammar="{}"))
        with pytest.raises(AssertionError, match="grammar"):
            driver.step([bound])
