"""Choices of an answer: which tokens are whose, when each ends, what is counted, and that the engine is let go."""

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from common.errors import DeadlineExceeded, GenerationFailed, WorkerLost
from common.messages.ids import ChoiceIndex, RequestId
from common.messages.logprobs import TokenLogprobs
from gateway.answer import ECHOED_AT_ONCE, Answer
from gateway.answer_parser import AnswerParser, Content, Piece, Reasoning
from gateway.echo import Echo
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, GenerateRequest, StageTimes, TokenDelta
from gateway.validation import AnswerForm
from tests.support.answer_harness import END_ID, TOKENIZER, PlayedEngine, SeenSink, accepted, play, record
from tests.support.tiny_tokenizer import byte_ids

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def say(text: str, at: int = 0, choice: int = 0, num_cached: int = 0) -> TokenDelta:
    return TokenDelta(at, tuple(byte_ids(TOKENIZER, text)), num_cached, ChoiceIndex(choice))


def end(reason: FinishReason, num_generated: int, choice: int = 0, num_cached: int = 0) -> EndOfChoice:
    return EndOfChoice(reason, num_generated, num_cached, ChoiceIndex(choice))


def choices(num_choices: int) -> AnswerForm:
    return AnswerForm(num_choices=num_choices, num_generated=num_choices)


@pytest.mark.parametrize(
    ("events", "stops", "text", "reason", "num_tokens"),
    [
        ([say("ab"), TokenDelta(2, (END_ID,)), end(STOP, 3)], [], "ab", "stop", 3),
        ([say("abcd"), TokenDelta(4, (END_ID,)), end(LENGTH, 5)], [], "abcd", "stop", 5),
        ([say("abcde"), end(LENGTH, 5)], [], "abcde", "length", 5),
        ([say("abST"), end(LENGTH, 4)], ["ST"], "ab", "stop", 4),
        ([say("aSTbc"), end(LENGTH, 5)], ["ST"], "a", "stop", 3),
        ([say("aS"), end(LENGTH, 2)], ["ST"], "aS", "length", 2),
        ([end(STOP, 0)], [], "", "stop", 0),
    ],
    ids=["end", "end at the limit", "limit", "stop at the limit", "text behind a stop", "half a stop", "nothing"],
)
async def test_b005_b006_how_a_choice_ends(
    events: list[GenerateEvent], stops: list[str], text: str, reason: str, num_tokens: int
) -> None:
    engine, sink = PlayedEngine(events), SeenSink()
    answer = await play(engine, accepted(stops=stops), sink)
    assert (sink.text(), sink.ends) == (text, [(0, reason)])
    assert answer.usage.completion_tokens == num_tokens
    assert engine.closed == [0]


async def test_b006_nothing_is_read_behind_a_stop_string() -> None:
    engine = PlayedEngine([say("aS"), say("T", 2), say("b", 3), end(LENGTH, 4)])
    await play(engine, accepted(stops=["ST"]), SeenSink())
    assert engine.num_played == [2]
    assert engine.ended == []


async def test_b053_a_stop_string_does_not_hide_what_was_cached() -> None:
    answer = await play(PlayedEngine([say("abS", num_cached=16)]), accepted(stops=["S"]), SeenSink())
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_b002_b005_b017_each_choice_on_its_own() -> None:
    events: list[GenerateEvent] = [
        say("abc", choice=1, num_cached=2),
        say("x", num_cached=2),
        say("deS", 3, choice=1),
        say("yz", 1),
        end(LENGTH, 3, num_cached=2),
    ]
    engine, sink = PlayedEngine(events), SeenSink()
    answer = await play(engine, accepted(form=choices(2), stops=["S"]), sink)
    assert (sink.text(0), sink.text(1)) == ("xyz", "abcde")
    assert sink.ends == [(1, "stop"), (0, "length")]
    assert engine.ended == [(RequestId("r"), ChoiceIndex(1))]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 9, 16)
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_what_comes_behind_the_stop_string_of_a_choice_is_not_taken() -> None:
    events: list[GenerateEvent] = [say("aS"), say("b", 2), end(LENGTH, 3), say("c", choice=1), end(LENGTH, 1, choice=1)]
    sink = SeenSink()
    answer = await play(PlayedEngine(events), accepted(form=choices(2), stops=["S"]), sink)
    assert (sink.text(0), sink.ends) == ("a", [(0, "stop"), (1, "length")])
    assert answer.usage.completion_tokens == 3


async def test_b014_b017_choices_of_several_prompts_are_numbered_by_prompt() -> None:
    def script(first: str, second: str) -> list[GenerateEvent]:
        return [
            *(say(second, choice=1), end(STOP, len(second), choice=1)),
            *(say(first, num_cached=1), end(STOP, len(first), num_cached=1)),
        ]

    engine, sink = PlayedEngine(script("a", "bb"), script("ccc", "dddd")), SeenSink()
    answer = await play(engine, accepted(num_prompts=2, form=choices(2)), sink)
    assert [sink.text(index) for index in range(4)] == ["a", "bb", "ccc", "dddd"]
    assert sorted(sink.ends) == [(index, "stop") for index in range(4)]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7 + 8, 10)
    assert usage.prompt_tokens_details.cached_tokens == 2


async def test_one_prompt_that_fails_ends_all() -> None:
    engine = PlayedEngine([say("a")], [say("b"), WorkerLost("gone")])
    with pytest.raises((WorkerLost, GenerationFailed)):
        await play(engine, accepted(num_prompts=2), SeenSink())
    assert sorted(engine.closed) == [0, 1]


async def test_b001_an_end_without_a_reason_is_an_error() -> None:
    with pytest.raises(GenerationFailed, match="without a reason"):
        await play(PlayedEngine([say("abc")]), accepted(), SeenSink())
    with pytest.raises(GenerationFailed, match="without a reason"):
        await play(PlayedEngine([say("a"), end(STOP, 1)]), accepted(form=choices(2)), SeenSink())


async def test_b001_what_the_engine_raises_is_raised_behind_the_text() -> None:
    sink = SeenSink()
    with pytest.raises(WorkerLost):
        await play(PlayedEngine([say("ab"), WorkerLost("gone")]), accepted(), sink)
    assert (sink.text(), sink.ends) == ("ab", [])


async def test_b001_silence_is_an_error() -> None:
    is_closed = asyncio.Event()

    class SilentEngine(PlayedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            try:
                await asyncio.Event().wait()
                yield TokenDelta(0, (1,))
            finally:
                is_closed.set()

    with pytest.raises(DeadlineExceeded):
        await Answer(accepted(), SilentEngine(), SeenSink(), record()).read(max_silence_s=0.01)
    assert is_closed.is_set()


async def test_the_times_are_those_of_the_choice_that_ended_last() -> None:
    times = [StageTimes(decode_s=1.0), StageTimes(decode_s=2.0)]
    events: list[GenerateEvent] = [
        EndOfChoice(STOP, 0, choice=ChoiceIndex(index), times=times[index]) for index in (1, 0)
    ]
    answer = await play(PlayedEngine(events), accepted(form=choices(2)), SeenSink())
    assert answer.times == times[0]


class Shouting:
    """A parser: capitals are thoughts; it holds back an `h` until it knows what follows; a `!` is the end."""

    markers: AbstractSet[str] = frozenset()
    is_over = False

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        self.is_over = "!" in text
        if text.endswith("h"):
            text, self._held = text[:-1], "h"
        return [Reasoning(letter) if letter.isupper() else Content(letter) for letter in text]

    def finish(self, reason: FinishReason) -> tuple[list[Piece], str]:
        return [Content(self._held)] if self._held else [], f"shouted_{reason}"


async def test_a_parser_of_its_own_types_the_text_of_each_choice() -> None:
    def make(model: object, prompt_ids: object) -> AnswerParser:
        return Shouting()

    events: list[GenerateEvent] = [say("h"), say("Ah", 1), say("b", choice=1), end(LENGTH, 3), end(STOP, 1, choice=1)]
    sink = SeenSink()
    await play(PlayedEngine(events), accepted(form=choices(2), make_parser=make), sink)
    assert sink.deltas == [
        (0, [Content("h"), Reasoning("A")], []),
        (1, [Content("b")], []),
        (0, [Content("h")], []),
    ]
    assert sink.ends == [(0, "shouted_length"), (1, "shouted_stop")]


async def test_a_choice_whose_parser_has_read_enough_is_over() -> None:
    def make(model: object, prompt_ids: object) -> AnswerParser:
        return Shouting()

    events: list[GenerateEvent] = [say("a!"), say("b", choice=1), end(LENGTH, 1, choice=1)]
    engine, sink = PlayedEngine(events), SeenSink()
    await play(engine, accepted(form=choices(2), make_parser=make), sink)
    assert (sink.text(0), sink.ends) == ("a!", [(0, "shouted_stop"), (1, "shouted_length")])
    assert engine.ended == [(RequestId("r"), ChoiceIndex(0))]


async def test_b010_tokens_are_told_though_a_parser_or_a_stop_string_holds_their_text_back() -> None:
    def make(model: object, prompt_ids: object) -> AnswerParser:
        return Shouting()

    form = AnswerForm(num_logprobs=0)
    sink = SeenSink()
    events: list[GenerateEvent] = [say("h"), say("a", 1), say("S", 2), say("h", 3), end(LENGTH, 4)]
    await play(PlayedEngine(events), accepted(form=form, stops=["ST"], make_parser=make), sink)
    assert [token.token_id for token in sink.tokens()] == byte_ids(TOKENIZER, "haSh")
    assert [len(tokens) for _, _, tokens in sink.deltas] == [1, 1, 1, 1, 0]


async def test_a_long_prompt_is_repeated_in_pieces_between_which_others_get_their_turn() -> None:
    num_tokens, num_turns = 2000, 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    form = AnswerForm(num_choices=2, num_generated=2, num_logprobs=0, echoes=True)
    request = accepted(form=form)
    echo = Echo("p" * num_tokens, [1] * num_tokens, range(num_tokens))
    request = replace(request, prompts=(replace(request.prompts[0], echo=echo),))
    told = TokenDelta(
        0, (5,), logprobs=(TokenLogprobs(-1.0),), prompt_logprobs=(TokenLogprobs(-0.5),) * (num_tokens - 1)
    )
    second = replace_struct(told, choice=ChoiceIndex(1), prompt_logprobs=())
    engine, sink = PlayedEngine([told, end(LENGTH, 1), second, end(LENGTH, 1, 1)]), SeenSink()
    running = asyncio.create_task(others())
    await play(engine, request, sink)
    running.cancel()
    assert num_turns >= 2 * num_tokens // ECHOED_AT_ONCE
    for index in range(2):
        assert sink.text(index).startswith(echo.text)
        tokens = sink.tokens(index)
        assert [token.offset for token in tokens] == list(range(num_tokens + 1))
        assert [token.logprobs for token in tokens[:2]] == [None, TokenLogprobs(-0.5)]
    assert max(len(tokens) for _, _, tokens in sink.deltas) <= ECHOED_AT_ONCE
