"""Logprobs of rows of logits: against plain log-softmax, ties by id, edges; and only where they are asked for."""

import math

import pytest
import torch

from common.messages.logprobs import TokenLogprobs
from common.runtime import scoring
from common.runtime.scoring import token_logprobs
from kernels.sampling import reference
from tests.support.samplers import SCORERS

VOCAB = 1000


@pytest.fixture(autouse=True, params=SCORERS)
def every_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "row_logprobs", request.param)


def random_logits(num_rows: int, *, step: float = 0.0, vocab: int = VOCAB) -> torch.Tensor:
    logits = 4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(num_rows))
    return (logits / step).round() * step if step else logits


def assert_close(ours: TokenLogprobs, expected: tuple[float, list[tuple[int, float]]]) -> None:
    logprob, top = expected
    assert ours.logprob == pytest.approx(logprob, abs=1e-5)
    assert [token for token, _ in ours.top] == [token for token, _ in top]
    assert [number for _, number in ours.top] == pytest.approx([number for _, number in top], abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("step", [0.0, 0.5, 4.0])  # with steps, many tokens are equally likely
def test_they_are_the_log_softmax(num_top: int, step: float) -> None:
    logits = random_logits(7, step=step)
    tokens = [0, VOCAB - 1, 3, 4, 5, int(logits[5].argmax()), int(logits[6].argmin())]
    found = token_logprobs(logits, tokens, [num_top] * 7)
    for row, token, each in zip(logits, tokens, found, strict=True):
        assert_close(each, reference.logprobs(row, token, num_top))


def test_equal_tokens_are_listed_by_id_wherever_the_list_ends() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [700, 30, 500]] = 1.0
    logits[1, [999, 998]] = 1.0
    top = [[token for token, _ in each.top] for each in token_logprobs(logits, [0, 0], [5, 1])]
    assert top == [[30, 500, 700, 0, 1], [998]]


def test_rows_ask_for_different_numbers() -> None:
    logits = random_logits(3)
    assert [len(each.top) for each in token_logprobs(logits, [1, 2, 3], [0, 7, 2])] == [0, 7, 2]
    assert len(token_logprobs(logits[:1, :4], [1], [20])[0].top) == 4


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(5, step=0.25)
    together = token_logprobs(logits, [9] * 5, [4] * 5)
    for row in range(5):
        (alone,) = token_logprobs(logits[row : row + 1], [9], [4])
        assert_close(alone, (together[row].logprob, list(together[row].top)))


def test_an_impossible_token_has_minus_infinity() -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [8, 3]] = 2.0
    (found,) = token_logprobs(logits, [5], [4])
    assert found.logprob == -math.inf
    assert [token for token, _ in found.top] == [3, 8, 0, 1]
    assert [number for _, number in found.top] == pytest.approx([math.log(0.5)] * 2 + [-math.inf] * 2)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    first, second = token_logprobs(logits, [0, 2], [1, 0])
    assert first == (0.0, ((0, 0.0),))
    assert second.logprob == pytest.approx(-math.log(3))


def test_a_large_vocabulary_keeps_five_digits() -> None:
    logits = torch.zeros(1, 262_144)
    logits[0, 0] = 12.0
    (found,) = token_logprobs(logits, [1], [1])
    assert found.logprob == pytest.approx(-math.log(262_143 + math.exp(12.0)), abs=1e-6)


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, VOCAB), [], []) == []


def test_the_logits_stay() -> None:
    logits = random_logits(2)
    before = logits.clone()
    token_logprobs(logits, [0, 1], [3, 3])
    assert torch.equal(logits, before)
