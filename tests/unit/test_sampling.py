"""Choice of the next token: order of the filters, penalties, edges, invalid rows, and seeded reproducibility."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import torch

from common.messages.sampling import SamplingParams
from kernels.sampling import reference
from kernels.sampling.candidates import candidates
from kernels.sampling.logits import adjust_logits
from kernels.sampling.op import NoToken
from kernels.sampling.row import SamplingRow
from kernels.sampling.uniform import uniform
from tests.support.samplers import SAMPLERS, Sampler

VOCAB = 10
BASE = SamplingParams(seed=0, max_tokens=100)


@pytest.fixture(params=SAMPLERS)
def sample(request: pytest.FixtureRequest) -> Sampler:
    sampler: Sampler = request.param
    return sampler


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(BASE, **changes)


def row(sampling: SamplingParams, prompt: Sequence[int] = (1,), generated: Sequence[int] = ()) -> SamplingRow:
    return SamplingRow([*prompt, *generated], len(prompt), sampling)


def distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return the probabilities that `sample` draws one row from."""
    pool = candidates(logits, sampling)
    ids = torch.arange(len(logits)) if pool.ids is None else pool.ids
    return torch.zeros(len(logits), dtype=torch.float64).scatter_(0, ids, pool.weights / pool.weights.sum())


def kept(probabilities: Sequence[float], sampling: SamplingParams) -> list[int]:
    """Return the ids that may be drawn when the model says `probabilities`."""
    result = distribution(torch.tensor(probabilities).log(), sampling)
    assert float(result.sum()) == pytest.approx(1.0)
    return result.nonzero().squeeze(1).tolist()


class TestOrderOfFilters:
    """B071: temperature, top-k, renormalise, top-p, min-p."""

    def test_b071_top_p_sees_what_top_k_left_renormalised(self) -> None:
        assert kept([0.1, 0.2, 0.3, 0.4], params(top_k=2, top_p=0.5)) == [3]

    def test_renormalised_cumulative_decides(self) -> None:
        probabilities = [0.35, 0.25, 0.20, 0.05, 0.03, 0.12 / 3, 0.12 / 3, 0.12 / 3]
        assert kept(probabilities, params(top_k=4, top_p=0.82)) == [0, 1, 2]

    def test_b071_temperature_comes_before_top_p(self) -> None:
        logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
        # Tempered: .4551 .2760 .1674 .1015, so three tokens are needed for .9 - and they hold .8985: all four.
        hot = distribution(logits, params(temperature=2.0, top_p=0.9))
        assert hot.tolist() == pytest.approx([0.4551, 0.2760, 0.1674, 0.1015], abs=1e-4)
        # Untempered: .6439 .2369 .0871 .0321.
        assert kept(logits.softmax(-1).tolist(), params(top_p=0.9)) == [0, 1, 2]

    def test_b079_min_p_uses_tempered_probabilities(self) -> None:
        # sqrt of the probabilities: relative to the best 1, .775, .548, .316.
        tempered = params(temperature=2.0, min_p=0.5)
        assert kept([0.5, 0.3, 0.15, 0.05], tempered) == [0, 1, 2]

    @pytest.mark.parametrize(("min_p", "expected"), [(0.2, [0, 1, 2]), (0.31, [0, 1]), (0.61, [0]), (1.0, [0])])
    def test_b079_min_p_is_relative_to_the_best_probability(self, min_p: float, expected: list[int]) -> None:
        assert kept([0.5, 0.3, 0.15, 0.05], params(min_p=min_p)) == expected


class TestSomethingAlwaysRemains:
    """B073 and B031."""

    @pytest.mark.parametrize(
        "sampling",
        [
            params(top_k=1, top_p=0.8, temperature=0.01),
            params(min_p=1.0),
            params(top_p=1e-9),
            params(top_p=0.0),
            params(temperature=1e-300),
            params(top_k=1, top_p=0.0, min_p=1.0),
        ],
    )
    def test_b073_the_best_token_alone(self, sampling: SamplingParams) -> None:
        assert kept([0.1, 0.2, 0.3, 0.4], sampling) == [3]

    def test_equal_logits_with_top_p(self) -> None:
        assert kept([0.1] * 10, params(top_p=0.1)) == [0]
        assert kept([0.1] * 10, params(top_p=0.35)) == [0, 1, 2, 3]

    def test_mask_that_leaves_one_token(self, sample: Sampler) -> None:
        logits = torch.full((VOCAB,), -torch.inf)
        logits[7] = -3.0
        for sampling in (params(top_k=1), params(top_k=5), params(top_p=0.5), params(min_p=0.5), params()):
            assert distribution(logits, sampling)[7] == 1.0
            assert sample(logits[None], [row(sampling)]) == [7]

    @pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 2**31])
    def test_top_k_off(self, top_k: int) -> None:
        assert len(kept([0.1] * VOCAB, params(top_k=top_k))) == VOCAB

    @pytest.mark.parametrize("top_k", [1, 3, VOCAB - 1])
    def test_top_k_keeps_k_of_equal_logits_lowest_ids_first(self, top_k: int) -> None:
        assert kept([0.1] * VOCAB, params(top_k=top_k)) == list(range(top_k))

    def test_top_p_one_is_off(self) -> None:
        assert kept([1e-9, 1.0 - 1e-9], params(top_p=1.0)) == [0, 1]


class TestAgainstReference:
    @pytest.mark.parametrize("vocab", [1, 33, 5000])
    @pytest.mark.parametrize(
        "sampling",
        [
            params(temperature=0.7),
            params(temperature=1.3, top_k=7),
            params(top_p=0.9),
            params(temperature=3.0, top_p=0.999),
            params(top_p=0.3),
            params(min_p=0.05),
            params(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02),
            params(temperature=2.0, top_k=4097, top_p=0.99),
        ],
    )
    @pytest.mark.parametrize("step", [0.0, 0.5])
    def test_distribution(self, sampling: SamplingParams, vocab: int, step: float) -> None:
        logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
        if step:  # many ties
            logits = (logits / step).round() * step
        torch.testing.assert_close(
            distribution(logits, sampling), reference.probabilities(logits, sampling), rtol=1e-9, atol=1e-12
        )

    def test_penalties(self) -> None:
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
        prompt, generated = [3, 3, 4, 49], [4, 0, 4]
        changes = params(
            repetition_penalty=1.4, presence_penalty=-0.5, frequency_penalty=0.7, min_tokens=9, stop_ids=(2, 0)
        )
        changed = row(changes, prompt, generated)
        plain = row(params(), prompt, generated)
        adjusted = adjust_logits(logits, [plain, changed, plain])
        torch.testing.assert_close(adjusted[1], reference.adjusted(logits[1], changed))
        assert torch.equal(adjusted[0], logits[0])
        assert torch.equal(adjusted[2], logits[2])


class TestPenalties:
    """B075."""

    def test_b075_presence_and_frequency_count_generated_tokens_alone(self) -> None:
        penalised = row(params(frequency_penalty=0.5, presence_penalty=0.25), [7, 7, 9], [9, 4])
        adjusted = adjust_logits(torch.ones(1, VOCAB), [penalised])[0].tolist()
        assert [adjusted[7], adjusted[9], adjusted[4], adjusted[0]] == [1.0, 0.25, 0.25, 1.0]

    def test_b075_repetition_counts_prompt_and_generated_once(self) -> None:
        logits = torch.ones(1, VOCAB)
        logits[0, 7], logits[0, 9] = 2.0, -1.0
        adjusted = adjust_logits(logits, [row(params(repetition_penalty=1.2), [7, 7, 9], [9, 4])])[0].tolist()
        assert [adjusted[7], adjusted[9], adjusted[0]] == pytest.approx([1.6667, -1.2, 1.0], abs=1e-4)

    def test_greedy_obeys_them(self, sample: Sampler) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 4], logits[0, 6] = 1.0, 0.9
        greedy = params(temperature=0.0, presence_penalty=0.25)
        assert sample(logits, [row(greedy)]) == [4]
        assert sample(logits, [row(greedy, generated=[4])]) == [6]

    def test_the_callers_logits_stay(self, sample: Sampler) -> None:
        logits = torch.ones(1, VOCAB)
        sample(logits, [row(params(repetition_penalty=2.0), [1, 2])])
        assert torch.equal(logits, torch.ones(1, VOCAB))

    def test_stop_ids_wait_for_min_tokens(self, sample: Sampler) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 3] = 5.0
        # 99 and -1 are no ids of this vocabulary and change nothing.
        greedy = params(temperature=0.0, stop_ids=(3, 99, -1), min_tokens=2)
        assert sample(logits, [row(greedy, generated=[5])]) == [0]
        assert sample(logits, [row(greedy, generated=[5, 5])]) == [3]


class TestInvalidRows:
    """B078: such a row yields nothing; its neighbours do not notice."""

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize("poison", [[torch.nan] * VOCAB, [torch.nan], [torch.inf], [-torch.inf] * VOCAB])
    def test_b078_no_token(self, sample: Sampler, poison: list[float], temperature: float) -> None:
        logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
        rows = [row(params(temperature=temperature, seed=seed)) for seed in range(3)]
        first, _, third = sample(logits, rows)
        logits[1, : len(poison)] = torch.tensor(poison)
        assert sample(logits, rows) == [first, NoToken.INVALID, third]
        assert isinstance(first, int)
        assert isinstance(third, int)

    def test_everything_forbidden(self, sample: Sampler) -> None:
        blocked = params(stop_ids=(0, 1), min_tokens=1)
        assert sample(torch.zeros(1, 2), [row(blocked)]) == [NoToken.VIOLATED]

    def test_nan_of_a_forbidden_token_counts(self, sample: Sampler) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 1] = torch.nan
        assert sample(logits, [row(params(stop_ids=(1,), min_tokens=1))]) == [NoToken.INVALID]

    def test_forbidden_tokens_alone_are_fine(self, sample: Sampler) -> None:
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[0, 6] = 0.0
        assert sample(logits, [row(params(temperature=0.0))]) == [6]


class TestSeeds:
    """B068: randomness is a function of (seed, choice, position) and nothing else."""

    SAMPLING = (
        params(seed=42, temperature=0.8),
        params(seed=42, temperature=0.8, top_p=0.9),
        params(seed=-(2**63), top_k=20),
        params(seed=2**63 - 1, min_p=0.02),
        params(seed=0, temperature=0.0),
        params(seed=7, repetition_penalty=1.3, frequency_penalty=0.5),
    )

    def test_neighbours_do_not_matter(self, sample: Sampler) -> None:
        logits = torch.randn(len(self.SAMPLING), 3000, generator=torch.Generator().manual_seed(5))
        rows = [row(sampling, [1, 2], [3] * position) for position, sampling in enumerate(self.SAMPLING)]
        together = sample(logits, rows)
        alone = [sample(logits[index : index + 1], [each])[0] for index, each in enumerate(rows)]
        assert together == alone
        assert sample(logits.flip(0), rows[::-1]) == together[::-1]

    def test_identical_requests_agree(self, sample: Sampler) -> None:
        logits = torch.randn(1, 3000).expand(2, -1)
        first, second = sample(logits, [row(self.SAMPLING[0])] * 2)
        assert first == second

    def test_position_choice_and_seed_all_matter(self) -> None:
        numbers = {uniform(seed, choice, position) for seed in range(5) for choice in range(5) for position in range(5)}
        assert len(numbers) == 125

    def test_numbers_are_the_same_on_every_machine(self) -> None:
        assert [
            uniform(*key) for key in ((0, 0, 0), (42, 0, 1), (-1, 1, 2), (2**63 - 1, 7, 100_000))
        ] == GOLDEN_UNIFORMS

    def test_numbers_are_uniform(self) -> None:
        counts = Counter(int(20 * uniform(seed, 0, position)) for seed in range(20) for position in range(500))
        chi_square = sum((counts[bin_] - 500) ** 2 / 500 for bin_ in range(20))
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001

    @pytest.mark.parametrize("sampling", [params(), params(top_k=3), params(top_p=0.9), params(min_p=0.1)])
    def test_frequencies_follow_the_probabilities(self, sample: Sampler, sampling: SamplingParams) -> None:
        logits = torch.tensor([0.5, 0.2, 0.05, 0.15, 0.1]).log()
        expected = reference.probabilities(logits, sampling)
        num_draws = 2000
        drawn = sample(
            logits.expand(num_draws, -1), [row(sampling, generated=[0] * index) for index in range(num_draws)]
        )
        counts = Counter(drawn)
        for token, probability in enumerate(expected.tolist()):
            assert counts[token] / num_draws == pytest.approx(probability, abs=0.04)
            assert (counts[token] == 0) == (probability == 0.0)


@pytest.mark.parametrize("vocab", [49_152, 49_000])
def test_greedy_takes_the_lowest_of_equal_ids(sample: Sampler, vocab: int) -> None:
    logits = torch.zeros(3, vocab)
    logits[0, [31_000, 31_001, 40_000]] = 1.0
    logits[2, vocab - 1] = 1.0
    assert sample(logits, [row(params(temperature=0.0))] * 3) == [31_000, 0, vocab - 1]
    logits[1, vocab - 1] = torch.nan
    assert sample(logits, [row(params(temperature=0.0))] * 3) == [31_000, NoToken.INVALID, vocab - 1]


def test_no_rows(sample: Sampler) -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


GOLDEN_UNIFORMS = [0.13870941014555427, 0.7129353372857994, 0.43449008027731306, 0.24902976638318242]
