"""Masks of a worker: what may come next, from the tokens alone; when an answer may end; what a grammar may cost."""

import asyncio
import gc
import itertools
import threading
import zlib

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from common.errors import GrammarViolated, InvalidGrammar
from common.grammar import matcher
from common.grammar.limits import MAX_GRAMMAR_BYTES
from common.runtime import grammars as grammars_module
from common.runtime.grammar_masks import MASKS_S, GrammarMasks
from common.runtime.grammars import Grammars
from kernels.sampling.op import NoToken
from tests.support.guided import PROMPT, allowed_ids, drawn, guided_sequence, loaded, regex_text, schema_text
from tests.support.tiny_tokenizer import EOS, HIDDEN, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = 300
"""More rows of logits than tokens."""
END = id_of(TOKENIZER, EOS)
OTHER_END = id_of(TOKENIZER, HIDDEN)
CARD = tiny_card(TOKENIZER, vocab_size=VOCAB_SIZE)
AB = regex_text("(ab)+c?")
A, B, C = byte_ids(TOKENIZER, "abc")


class _Panic(BaseException):
    """Like that of a native library, which is no `Exception`."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return loaded(CARD)


@pytest.fixture
def masks(grammars: Grammars) -> GrammarMasks:
    return GrammarMasks(grammars)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that have compiled something."""
    threads: list[str] = []
    real = matcher.compile_matcher

    def compile_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
        threads.append(threading.current_thread().name)
        return real(tokenizer, grammar)

    monkeypatch.setattr(grammars_module, "compile_matcher", compile_matcher)
    return threads


class TestMasks:
    def test_without_a_grammar_there_is_none(self, masks: GrammarMasks) -> None:
        assert masks.allowed(guided_sequence(None)) is None

    def test_what_may_come_next_follows_from_the_tokens(self, masks: GrammarMasks) -> None:
        sequence = guided_sequence(AB)
        seen = []
        for token in (A, B, C, END):
            seen.append(allowed_ids(masks, sequence))
            sequence.token_ids.append(token)
        assert seen == [[A], [B], sorted([A, C, END]), [END]]

    def test_a_sequence_that_others_have_begun_is_caught_up_with(self, masks: GrammarMasks) -> None:
        assert allowed_ids(masks, guided_sequence(AB, (A, B, A))) == [B]

    @pytest.mark.parametrize("history", [(), (A,), (A, B, A)], ids=["none", "shorter", "other"])
    def test_another_history_is_followed_from_its_beginning(
        self, masks: GrammarMasks, history: tuple[int, ...]
    ) -> None:
        sequence = guided_sequence(AB, (A, B, C))
        assert allowed_ids(masks, sequence) == [END]
        sequence.token_ids[len(PROMPT) :] = history
        assert allowed_ids(masks, sequence) == allowed_ids(masks, guided_sequence(AB, history))

    def test_sequences_of_one_grammar_do_not_disturb_each_other(self, masks: GrammarMasks) -> None:
        first, second = guided_sequence(AB), guided_sequence(AB, (A,))
        assert allowed_ids(masks, first) == [A]
        assert allowed_ids(masks, second) == [B]
        assert allowed_ids(masks, first) == [A]

    def test_a_mask_belongs_to_who_asked(self, masks: GrammarMasks) -> None:
        sequence = guided_sequence(AB)
        kept = masks.allowed(sequence)
        assert kept is not None
        copy = kept.clone()
        sequence.token_ids.append(A)
        masks.allowed(sequence)
        assert torch.equal(kept, copy)

    def test_what_is_known_of_a_sequence_ends_with_it(self, masks: GrammarMasks) -> None:
        sequence = guided_sequence(AB)
        masks.allowed(sequence)
        assert len(masks._progress) == 1
        del sequence
        gc.collect()
        assert not masks._progress

    def test_tokens_that_are_not_of_the_grammar(self, masks: GrammarMasks) -> None:
        with pytest.raises(GrammarViolated, match="not of the grammar"):
            masks.allowed(guided_sequence(AB, (C,)))

    def test_what_cannot_be_compiled_is_a_violation_each_time(self, masks: GrammarMasks) -> None:
        for _ in range(2):
            with pytest.raises(GrammarViolated, match="cannot be compiled"):
                masks.allowed(guided_sequence(regex_text("[")))

    def test_a_sequence_whose_masks_are_too_expensive_is_given_up(self, grammars: Grammars) -> None:
        readings = itertools.count(step=MASKS_S * 0.6)
        masks = GrammarMasks(grammars, clock=lambda: float(next(readings)))
        sequence = guided_sequence(AB)
        masks.allowed(sequence)
        sequence.token_ids.append(A)
        with pytest.raises(GrammarViolated, match="too expensive"):
            masks.allowed(sequence)
        masks.allowed(guided_sequence(AB))  # others go on


class TestEnd:
    def test_all_tokens_that_end_an_answer_are_allowed_where_it_may_end(self) -> None:
        masks = GrammarMasks(loaded(tiny_card(TOKENIZER, eos_ids=(END, OTHER_END))))
        assert allowed_ids(masks, guided_sequence(AB, (A, B, C))) == sorted([END, OTHER_END])
        assert END not in allowed_ids(masks, guided_sequence(AB, (A,)))

    def test_nothing_but_the_end_follows_the_end(self, masks: GrammarMasks) -> None:
        assert allowed_ids(masks, guided_sequence(AB, (A, B, C, END, END))) == [END]

    def test_rows_without_a_token_are_never_allowed(self, masks: GrammarMasks) -> None:
        allowed = allowed_ids(masks, guided_sequence(regex_text("(?s:.)*")))
        assert max(allowed) < TOKENIZER.get_vocab_size()

    def test_an_answer_that_must_not_end_and_cannot_go_on_is_violated(self, masks: GrammarMasks) -> None:
        sequence = guided_sequence(regex_text("ab"), stop_ids=(END,), min_tokens=5)
        tokens = list(itertools.islice(drawn(masks, sequence, VOCAB_SIZE, seed=1), 3))
        assert tokens == [A, B, NoToken.VIOLATED]

    def test_white_space_cannot_go_on_for_ever(self, masks: GrammarMasks) -> None:
        blank, newline, tab = byte_ids(TOKENIZER, " \n\t")
        sequence = guided_sequence(schema_text({"type": "object"}), tuple(byte_ids(TOKENIZER, "{")))
        written = []
        while spaces := {blank, newline, tab} & set(allowed_ids(masks, sequence)):
            written.append(max(spaces, key=[tab, blank, newline].index))
            sequence.token_ids.append(written[-1])
            assert len(written) < 30
        assert written[0] == newline

    @pytest.mark.parametrize("bias", [-100.0, 100.0])
    def test_bias_chooses_within_the_grammar_alone(self, masks: GrammarMasks, bias: float) -> None:
        sequence = guided_sequence(AB, stop_ids=(END,), logit_bias=((A, bias), (B, bias), (5, 100.0)))
        assert list(itertools.islice(drawn(masks, sequence, VOCAB_SIZE, seed=1), 2)) == [A, B]


class TestPreparation:
    async def test_equal_grammars_are_compiled_once_and_not_by_the_loop(self, compilations: list[str]) -> None:
        grammars = loaded(CARD)
        await asyncio.gather(*(grammars.prepare(AB) for _ in range(3)))
        await grammars.prepare(AB)
        grammars.matcher(AB)
        assert compilations == ["grammar"]

    async def test_a_grammar_that_was_refused_is_refused_again(self, compilations: list[str]) -> None:
        grammars = loaded(CARD)
        for _ in range(2):
            with pytest.raises(InvalidGrammar, match="unclosed"):
                await grammars.prepare(regex_text("["))
        assert len(compilations) == 1

    async def test_what_had_to_make_room_is_compiled_again(
        self, compilations: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammars_module, "MAX_KNOWN", 1)
        grammars = loaded(CARD)
        await grammars.prepare(AB)
        await grammars.prepare(regex_text("x"))
        assert allowed_ids(GrammarMasks(grammars), guided_sequence(AB)) == [A]
        assert len(compilations) == 3

    async def test_who_waits_is_called_once_it_is_ready(self) -> None:
        grammars, outcomes = loaded(CARD), asyncio.Queue[str | None]()
        grammars.when_ready(AB, outcomes.put_nowait)
        assert outcomes.empty()
        assert await outcomes.get() is None
        grammars.when_ready(AB, outcomes.put_nowait)
        assert outcomes.get_nowait() is None  # at once
        grammars.when_ready(regex_text("["), outcomes.put_nowait)
        assert "unclosed" in str(await outcomes.get())

    async def test_who_waits_is_told_that_the_compiler_has_failed(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: object) -> LLMatcher:
            raise _Panic("a bug of the compiler")

        monkeypatch.setattr(grammars_module, "compile_matcher", fail)
        grammars, outcomes = loaded(CARD), asyncio.Queue[str | None]()
        grammars.when_ready(AB, outcomes.put_nowait)
        async with asyncio.timeout(10):
            assert await outcomes.get() == "it cannot be compiled"
        assert "a bug of the compiler" in caplog.text

    async def test_nobody_is_called_behind_the_end(self) -> None:
        grammars, outcomes = loaded(CARD), asyncio.Queue[str | None]()
        grammars.when_ready(AB, outcomes.put_nowait)
        await grammars.close()
        assert outcomes.empty()

    async def test_a_grammar_that_is_too_long(self) -> None:
        with pytest.raises(InvalidGrammar, match=str(MAX_GRAMMAR_BYTES)):
            await loaded(CARD).prepare(" " * (MAX_GRAMMAR_BYTES + 1))

    @pytest.mark.parametrize(
        "changes", [{"tokenizer": b"?"}, {"tokenizer": zlib.compress(b"{}")}, {"eos_ids": ()}, {"eos_ids": (10**6,)}]
    )
    async def test_without_a_vocabulary_every_grammar_is_refused(self, changes: dict[str, object]) -> None:
        grammars = Grammars(tiny_card(TOKENIZER, **changes))
        grammars.load()
        with pytest.raises(InvalidGrammar, match="tokenizer of this model"):
            await grammars.prepare(AB)

    async def test_a_vocabulary_that_cannot_spell_what_must_come_first(self) -> None:
        words = Tokenizer(models.WordLevel({"<unk>": 0, EOS: 1, "one ": 2, "ore ": 3, "two ": 4}, unk_token="<unk>"))
        words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        words.add_special_tokens([AddedToken(EOS, special=True)])
        grammars = loaded(tiny_card(words))
        await grammars.prepare(regex_text("(one |two )+"))
        with pytest.raises(InvalidGrammar, match="cannot spell"):
            await grammars.prepare(regex_text("(one |ore )+"))

    def test_a_vocabulary_of_more_tokens_than_rows(self) -> None:
        masks = GrammarMasks(loaded(tiny_card(TOKENIZER, vocab_size=END + 1)))
        assert allowed_ids(masks, guided_sequence(AB)) == [A]
