"""Text, stop and counts of one choice out of its tokens."""

import pytest

from common.errors import GenerationFailed
from common.messages.logprobs import TokenLogprobs
from gateway.engine import TokenDelta
from gateway.text_stream import AnswerText, AnswerToken, StopRules
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
MODEL = ModelTokenizer(tiny_card(TOKENIZER))
END_ID = id_of(TOKENIZER, EOS)


def answer_text(*strings: str, min_tokens: int = 0, ignore_eos: bool = False, shows_stop: bool = False) -> AnswerText:
    ends = frozenset() if ignore_eos else frozenset({END_ID})
    return AnswerText(MODEL.detokenizer(), StopRules(strings, ends, min_tokens, is_shown=shows_stop))


def one_by_one(ids: list[int]) -> list[TokenDelta]:
    return [TokenDelta(index, (token_id,)) for index, token_id in enumerate(ids)]


def text_of(answer: AnswerText, *deltas: TokenDelta) -> str:
    return "".join([answer.push(delta) for delta in deltas]) + answer.finish()


def ids_of(*words: str) -> list[int]:
    return [id_of(TOKENIZER, word) for word in words]


def test_the_end_token_is_counted_and_not_shown() -> None:
    ids = [*byte_ids(TOKENIZER, "ab"), END_ID]
    answer = answer_text()
    assert text_of(answer, *one_by_one(ids)) == TOKENIZER.decode(ids) == "ab"
    assert (answer.num_tokens, answer.is_stopped, answer.has_stop_string) == (3, True, False)


@pytest.mark.parametrize("has_cut", [True, False])
def test_b006_stop_spanning_tokens(has_cut: bool) -> None:
    ids = ids_of("AB", "CD", "EF", "GH", "I", "J", "Ġ", "x")
    answer = answer_text("DEFGHIJ")
    deltas = one_by_one(ids) if has_cut else [TokenDelta(0, tuple(ids))]
    assert text_of(answer, *deltas) == "ABC"
    assert (answer.num_tokens, answer.has_stop_string) == (6, True)


def test_b006_a_stop_that_never_completes_is_shown() -> None:
    assert text_of(answer_text("ST"), *one_by_one(byte_ids(TOKENIZER, "aS"))) == "aS"


@pytest.mark.parametrize(("stops", "text"), [(["ST"], "aST"), (["ST", "S"], "aS"), (["XaST", "ST"], "aST")])
def test_a_stop_string_can_be_shown(stops: list[str], text: str) -> None:
    assert text_of(answer_text(*stops, shows_stop=True), *one_by_one(byte_ids(TOKENIZER, "aSTb"))) == text


def test_min_tokens_defers_stop_strings() -> None:
    assert text_of(answer_text("S", min_tokens=3), *one_by_one(byte_ids(TOKENIZER, "SabSc"))) == "Sab"


@pytest.mark.parametrize(("shows_stop", "text"), [(False, "a"), (True, "ax")])
def test_the_stop_token_is_not_shown_even_if_it_is_text(shows_stop: bool, text: str) -> None:
    letter = id_of(TOKENIZER, "x")
    answer = AnswerText(MODEL.detokenizer(), StopRules((), frozenset({letter}), is_shown=shows_stop))
    assert answer.push(TokenDelta(0, (id_of(TOKENIZER, "a"), letter))) == text
    assert (answer.num_tokens, answer.is_stopped) == (2, True)


@pytest.mark.parametrize(("skips_special", "text"), [(True, "ab"), (False, f"a{EOS}b")])
def test_ignored_end_tokens_go_on(skips_special: bool, text: str) -> None:
    ids = [*byte_ids(TOKENIZER, "a"), END_ID, *byte_ids(TOKENIZER, "b")]
    answer = AnswerText(MODEL.detokenizer(skips_special=skips_special), StopRules())
    assert text_of(answer, *one_by_one(ids)) == text == TOKENIZER.decode(ids, skip_special_tokens=skips_special)
    assert answer.num_tokens == 3


def test_b009_half_a_character_at_the_end() -> None:
    ids = byte_ids(TOKENIZER, "a日")[:-1]
    assert text_of(answer_text(), *one_by_one(ids)) == "a\ufffd" == TOKENIZER.decode(ids)


def test_b009_half_a_character_before_a_stop_string() -> None:
    ids = [*byte_ids(TOKENIZER, "日")[:-1], *byte_ids(TOKENIZER, "S")]
    assert text_of(answer_text("S"), *one_by_one(ids)) == "\ufffd"


def test_a_missing_token_is_an_error() -> None:
    with pytest.raises(GenerationFailed, match="missing"):
        text_of(answer_text(), TokenDelta(0, (1,)), TokenDelta(2, (1,)))


def test_b009_b010_every_token_is_told_once_with_the_place_of_its_text() -> None:
    told: list[AnswerToken] = []
    ids = [*byte_ids(TOKENIZER, "a日b"), *byte_ids(TOKENIZER, "ST"), END_ID]
    logprobs = [TokenLogprobs(-float(index)) for index in range(len(ids))]
    answer = AnswerText(MODEL.detokenizer(), StopRules(["ST!"], frozenset({END_ID})), told.append)
    answer.start_behind(10)
    deltas = [TokenDelta(index, (ids[index],), logprobs=(logprobs[index],)) for index in range(len(ids))]
    assert text_of(answer, *deltas) == "a日bST"
    assert [token.token_id for token in told] == ids[:-1]
    assert [token.logprobs for token in told] == logprobs[:-1]
    assert [token.offset for token in told] == [10, 11, 11, 11, 12, 13, 14]
    assert answer.sum_logprobs == sum(entry.logprob for entry in logprobs)


@pytest.mark.parametrize("stops", [[], ["ST"]])
def test_best_of_counts_logprobs_that_are_not_told(stops: list[str]) -> None:
    answer = AnswerText(MODEL.detokenizer(), StopRules(stops))
    answer.push(TokenDelta(0, tuple(byte_ids(TOKENIZER, "ab")), logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.5))))
    assert answer.sum_logprobs == -3.5
