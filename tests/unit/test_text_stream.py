"""Text, stop and usage out of tokens."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from common.errors import DeadlineExceeded, GenerationFailed, WorkerLost
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, TokenDelta
from gateway.text_stream import AnswerText, TextDelta, TextEnd, stream_text
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
MODEL = ModelTokenizer(tiny_card(TOKENIZER))
END_ID = id_of(TOKENIZER, EOS)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


class Source:
    """Plays events, and knows whether it was closed."""

    def __init__(self, *events: GenerateEvent | Exception) -> None:
        self._events = events
        self.num_played = 0
        self.is_closed = False

    async def play(self) -> AsyncGenerator[GenerateEvent, None]:
        try:
            for event in self._events:
                if isinstance(event, Exception):
                    raise event
                self.num_played += 1
                yield event
        finally:
            self.is_closed = True


def tokens(ids: list[int], end: EndOfChoice | None = None) -> Source:
    deltas = [TokenDelta(index, (token_id,)) for index, token_id in enumerate(ids)]
    return Source(*deltas, *([end] if end else []))


async def read(
    source: Source, stops: list[str] | None = None, min_tokens: int = 0, ignore_eos: bool = False
) -> tuple[str, TextEnd]:
    stop_ids = () if ignore_eos else (END_ID,)
    answer = AnswerText(MODEL.detokenizer(), stops or [], stop_ids, min_tokens)
    events = [event async for event in stream_text(source.play(), answer, max_silence_s=5, on_tokens=lambda _: None)]
    *deltas, end = events
    assert all(isinstance(delta, TextDelta) and delta.text for delta in deltas)
    assert isinstance(end, TextEnd)
    assert source.is_closed
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)), end


def ids_of(*words: str) -> list[int]:
    return [id_of(TOKENIZER, word) for word in words]


@pytest.mark.parametrize(
    ("ids", "reported", "reason"),
    [
        ([*byte_ids(TOKENIZER, "ab"), END_ID], STOP, STOP),
        ([*byte_ids(TOKENIZER, "abcd"), END_ID], LENGTH, STOP),
        (byte_ids(TOKENIZER, "abcde"), LENGTH, LENGTH),
    ],
    ids=["end before the limit", "end on the last allowed token", "limit"],
)
async def test_b005_finish_reason(ids: list[int], reported: FinishReason, reason: FinishReason) -> None:
    text, end = await read(tokens(ids, EndOfChoice(reported, len(ids), 2)))
    assert text == TOKENIZER.decode(ids)
    assert end == TextEnd(reason, len(ids), 2)


async def test_b053_a_stop_string_does_not_hide_what_was_cached() -> None:
    source = Source(TokenDelta(0, tuple(byte_ids(TOKENIZER, "ab")), 16), TokenDelta(2, (id_of(TOKENIZER, "S"),), 16))
    assert await read(source, ["S"]) == ("ab", TextEnd(STOP, 3, 16))


async def test_b005_stop_string_on_the_last_allowed_token() -> None:
    text, end = await read(tokens(byte_ids(TOKENIZER, "abST"), EndOfChoice(LENGTH, 4)), ["ST"])
    assert (text, end.finish_reason) == ("ab", STOP)


async def test_b006_stop_spanning_tokens() -> None:
    words = ["AB", "CD", "EF", "GH", "I", "J", "Ġ", "x"]
    source = tokens(ids_of(*words), EndOfChoice(LENGTH, len(words)))
    text, end = await read(source, ["DEFGHIJ"])
    assert (text, end.finish_reason) == ("ABC", STOP)
    assert end.num_tokens == source.num_played == 6


async def test_b006_tokens_of_the_same_delta_behind_the_stop_do_not_count() -> None:
    source = Source(TokenDelta(0, tuple(byte_ids(TOKENIZER, "aSTbc"))), EndOfChoice(LENGTH, 5))
    text, end = await read(source, ["ST"])
    assert (text, end.num_tokens) == ("a", 3)


async def test_b006_a_stop_that_never_completes_is_shown() -> None:
    assert (await read(tokens(byte_ids(TOKENIZER, "aS"), EndOfChoice(LENGTH, 2)), ["ST"]))[0] == "aS"


async def test_min_tokens_defers_stop_strings() -> None:
    source = tokens(byte_ids(TOKENIZER, "SabSc"), EndOfChoice(LENGTH, 5))
    assert (await read(source, ["S"], min_tokens=3))[0] == "Sab"


async def test_the_stop_token_is_not_shown_even_if_it_is_text() -> None:
    letter = id_of(TOKENIZER, "x")
    answer = AnswerText(MODEL.detokenizer(), [], [letter])
    assert answer.push(TokenDelta(0, (id_of(TOKENIZER, "a"), letter))) == "a"
    assert (answer.num_tokens, answer.is_stopped) == (2, True)


async def test_ignored_end_tokens_go_on_and_stay_hidden() -> None:
    ids = [*byte_ids(TOKENIZER, "a"), END_ID, *byte_ids(TOKENIZER, "b")]
    text, end = await read(tokens(ids, EndOfChoice(LENGTH, 3)), ignore_eos=True)
    assert (text, end.finish_reason, end.num_tokens) == ("ab", LENGTH, 3)


async def test_b009_half_a_character_at_the_end() -> None:
    ids = byte_ids(TOKENIZER, "a日")[:-1]
    text, end = await read(tokens(ids, EndOfChoice(LENGTH, len(ids))))
    assert text == "a\ufffd" == TOKENIZER.decode(ids)
    assert end.finish_reason == LENGTH


async def test_b009_half_a_character_before_a_stop_string() -> None:
    ids = [*byte_ids(TOKENIZER, "日")[:-1], *byte_ids(TOKENIZER, "S")]
    assert (await read(tokens(ids, EndOfChoice(LENGTH, 3)), ["S"]))[0] == "\ufffd"


async def test_b001_an_end_without_a_reason_is_an_error() -> None:
    with pytest.raises(GenerationFailed, match="without a reason"):
        await read(tokens(byte_ids(TOKENIZER, "abc")))


async def test_b001_what_the_engine_raises_is_raised_behind_the_text() -> None:
    source = Source(TokenDelta(0, tuple(byte_ids(TOKENIZER, "ab"))), WorkerLost("gone"))
    counts: list[int] = []
    events = stream_text(
        source.play(), AnswerText(MODEL.detokenizer(), [], []), max_silence_s=5, on_tokens=counts.append
    )
    assert await anext(events) == TextDelta("ab")
    with pytest.raises(WorkerLost):
        await anext(events)
    assert counts == [2]


async def test_b001_silence_is_an_error() -> None:
    is_closed = asyncio.Event()

    async def silent() -> AsyncGenerator[GenerateEvent, None]:
        try:
            await asyncio.Event().wait()
            yield TokenDelta(0, (1,))
        finally:
            is_closed.set()

    answer = AnswerText(MODEL.detokenizer(), [], [])
    with pytest.raises(DeadlineExceeded):
        await anext(stream_text(silent(), answer, max_silence_s=0.01, on_tokens=lambda _: None))
    assert is_closed.is_set()


async def test_a_missing_token_is_an_error() -> None:
    with pytest.raises(GenerationFailed, match="missing"):
        await read(Source(TokenDelta(0, (1,)), TokenDelta(2, (1,))))
