"""What a client or a grammar demands of the logits: bias, prohibitions, masks. Each stays within its own row."""

from collections.abc import Sequence

import msgspec
import pytest
import torch

from common.messages.sampling import SamplingParams
from kernels.sampling import reference
from kernels.sampling.logits import adjust_logits
from kernels.sampling.op import NoToken
from kernels.sampling.row import SamplingRow
from tests.support.samplers import SAMPLERS, Sampler

VOCAB = 70
BASE = SamplingParams(seed=0, max_tokens=10_000)
GREEDY = msgspec.structs.replace(BASE, temperature=0.0)


@pytest.fixture(params=SAMPLERS)
def sample(request: pytest.FixtureRequest) -> Sampler:
    sampler: Sampler = request.param
    return sampler


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(BASE, **changes)


def row(
    sampling: SamplingParams,
    prompt: Sequence[int] = (1,),
    generated: Sequence[int] = (),
    *,
    choice: int = 0,
    allowed: torch.Tensor | None = None,
) -> SamplingRow:
    return SamplingRow([*prompt, *generated], len(prompt), sampling, choice, allowed)


def mask(*tokens: int, num_words: int = 3) -> torch.Tensor:
    words = [0] * num_words
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


class TestLogitBias:
    def test_b076_a_banned_token_occurs_in_no_choice(self, sample: Sampler) -> None:
        banned = params(logit_bias=((5, -100.0),))
        logits = torch.zeros(10, VOCAB)
        logits[:, 5] = 8.0
        drawn = [
            token
            for position in range(100)
            for token in sample(logits, [row(banned, generated=[0] * position, choice=choice) for choice in range(10)])
        ]
        assert 5 not in drawn
        assert len(set(drawn)) == VOCAB - 1
        assert 5 in sample(logits, [row(params(), choice=choice) for choice in range(10)])

    @pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 0.1}])
    def test_b076_a_wanted_token_comes_always(self, sample: Sampler, changes: dict[str, object]) -> None:
        wanted = params(logit_bias=((5, 100.0),), **changes)
        rows = [row(wanted, generated=[0] * position, choice=choice) for choice in range(4) for position in range(20)]
        assert set(sample(logits_of(len(rows)), rows)) == {5}

    def test_it_is_added_before_the_penalties(self) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 7], logits[0, 9] = -1.0, 1.0
        biased = params(
            logit_bias=((7, 3.0), (9, -3.0), (4, 0.5)),
            repetition_penalty=2.0,
            presence_penalty=0.25,
            frequency_penalty=0.5,
        )
        adjusted = adjust_logits(logits, [row(biased, [7, 9], [4, 4])])[0].tolist()
        assert [adjusted[7], adjusted[9], adjusted[4], adjusted[0]] == [1.0, -4.0, 0.25 - 0.25 - 1.0, 0.0]

    def test_it_may_lift_a_token_over_a_penalty_and_back(self, sample: Sampler) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 4] = 1.0
        for bias, expected in ((0.0, 0), (1.5, 4)):
            sampling = params(temperature=0.0, presence_penalty=2.0, logit_bias=((4, bias),))
            assert sample(logits, [row(sampling, generated=[4])]) == [expected]

    def test_top_k_counts_after_it(self, sample: Sampler) -> None:
        assert sample(logits_of(1), [row(params(top_k=1, logit_bias=((69, 50.0),)))]) == [69]

    def test_the_mask_outlives_it(self, sample: Sampler) -> None:
        sampling = params(temperature=0.0, logit_bias=((5, 100.0), (6, -100.0)))
        assert sample(logits_of(1), [row(sampling, allowed=mask(6))]) == [6]

    def test_b076_rows_that_join_and_leave_keep_their_own(self, sample: Sampler) -> None:
        own = {5: row(params(logit_bias=((5, 100.0),))), 6: row(params(logit_bias=((6, 100.0),))), 7: row(GREEDY)}
        logits = logits_of(1).expand(3, -1)
        own[int(logits[0].argmax())] = own.pop(7)
        for batch in ([0, 1, 2], [2, 0], [1], [1, 2, 0], [2, 1], [0]):
            tokens = [list(own)[index] for index in batch]
            assert sample(logits[: len(batch)], [own[token] for token in tokens]) == tokens

    def test_zero_and_no_bias_are_the_same(self, sample: Sampler) -> None:
        logits = logits_of(4)
        rows = [row(params(logit_bias=bias), choice=choice) for choice in (0, 1) for bias in ((), ((3, 0.0),))]
        first, second, third, fourth = sample(logits[:1].expand(4, -1), rows)
        assert (first, third) == (second, fourth)


class TestOutsideTheVocabulary:
    """An id that is none changes nothing: neither its own row nor a neighbour's."""

    OUTSIDE = (VOCAB, VOCAB + 3, -1, -VOCAB, 2**31, -(2**40))

    @pytest.mark.parametrize("token", OUTSIDE)
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_no_logit_moves(self, token: int, place: int) -> None:
        logits = logits_of(3)
        rows = [row(GREEDY)] * 3
        for strange in (params(logit_bias=((token, 100.0),)), params(stop_ids=(token,), min_tokens=3)):
            rows[place] = row(strange)
            assert torch.equal(adjust_logits(logits, rows), logits)

    def test_the_ids_beside_it_count(self) -> None:
        logits = torch.zeros(1, VOCAB)
        sampling = params(logit_bias=((VOCAB, 9.0), (3, 1.0), (-1, 9.0)), stop_ids=(4, VOCAB, -1), min_tokens=1)
        expected = torch.zeros(VOCAB)
        expected[3], expected[4] = 1.0, -torch.inf
        assert torch.equal(adjust_logits(logits, [row(sampling)])[0], expected)


class TestMask:
    @pytest.mark.parametrize("token", [0, 31, 32, 63, 64, VOCAB - 1])
    @pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {}])
    def test_the_only_allowed_token_comes_whatever_the_filters_prefer(
        self, sample: Sampler, token: int, changes: dict[str, object]
    ) -> None:
        logits = logits_of(1)
        logits[0, (token + 1) % VOCAB] = 90.0
        assert sample(logits, [row(params(**changes), allowed=mask(token))]) == [token]

    def test_what_is_drawn_is_allowed(self, sample: Sampler) -> None:
        allowed = (2, 40, 41)
        rows = [row(params(temperature=5.0), generated=[0] * index, allowed=mask(*allowed)) for index in range(200)]
        assert set(sample(logits_of(200), rows)) == set(allowed)

    def test_tokens_behind_a_short_mask_are_forbidden_and_bits_behind_the_vocabulary_mean_nothing(
        self, sample: Sampler
    ) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 50] = 1.0
        full = torch.full((1,), -1, dtype=torch.int32)
        adjusted = adjust_logits(logits, [row(GREEDY, allowed=full)])[0]
        assert adjusted.isfinite().nonzero().flatten().tolist() == list(range(32))
        assert sample(logits, [row(GREEDY, allowed=mask(50, 90, 127, num_words=4))]) == [50]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_nothing_allowed(self, sample: Sampler, temperature: float) -> None:
        logits = logits_of(3)
        rows = [row(params(temperature=temperature, seed=seed)) for seed in range(3)]
        first, _, third = sample(logits, rows)
        nothing = [mask(), torch.empty(0, dtype=torch.int32), mask(80, 90)]
        for allowed in nothing:
            rows[1] = row(params(temperature=temperature), allowed=allowed)
            assert sample(logits, rows) == [first, NoToken.VIOLATED, third]

    def test_nothing_is_left_between_mask_and_prohibition(self, sample: Sampler) -> None:
        waiting = params(stop_ids=(3,), min_tokens=2)
        assert sample(logits_of(1), [row(waiting, allowed=mask(3))]) == [NoToken.VIOLATED]
        assert sample(logits_of(1), [row(waiting, generated=[5, 5], allowed=mask(3))]) == [3]

    def test_what_the_model_forbids_is_not_the_mask_s_fault_alone(self, sample: Sampler) -> None:
        logits = torch.full((2, VOCAB), -torch.inf)
        logits[0, 9] = 1.0
        rows = [row(GREEDY, allowed=mask(8)), row(GREEDY, allowed=mask(8))]
        assert sample(logits, rows) == [NoToken.VIOLATED, NoToken.INVALID]

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_bad_logits_are_found_behind_a_mask(self, sample: Sampler, value: float) -> None:
        logits = logits_of(1)
        logits[0, 9] = value
        for allowed in (mask(8), mask()):
            assert sample(logits, [row(GREEDY, allowed=allowed)]) == [NoToken.INVALID]

    def test_neighbours_stay(self) -> None:
        logits = logits_of(3)
        adjusted = adjust_logits(logits, [row(GREEDY), row(GREEDY, allowed=mask(1)), row(GREEDY)])
        assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])


def test_all_of_it_is_what_the_reference_does() -> None:
    logits = logits_of(2)
    demanding = row(
        params(
            logit_bias=((0, -2.5), (69, 4.0), (31, 1.0)),
            repetition_penalty=1.4,
            presence_penalty=-0.5,
            frequency_penalty=0.7,
            min_tokens=9,
            stop_ids=(2, 0),
        ),
        [3, 3, 4, 69],
        [4, 0, 4],
        allowed=mask(*range(0, VOCAB, 2), 69),
    )
    adjusted = adjust_logits(logits, [row(GREEDY), demanding])
    torch.testing.assert_close(adjusted[1], reference.adjusted(logits[1], demanding))
    assert torch.equal(adjusted[0], logits[0])
