"""Tokens that are taken the moment they come: in order, each once, by the tap or by the reader, never by both."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest

from common.messages.ids import ChoiceIndex, RequestId
from gateway.answer import Answer
from gateway.choice import MAX_READ
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, GenerateRequest, Tap, TokenDelta
from gateway.streams import Stream
from tests.support.answer_harness import TOKENIZER, PlayedEngine, SeenSink, accepted, record
from tests.support.stream_events import DECODE, GONE, MAX_FAILURES, finished, make_stream, tokens
from tests.support.stream_events import accepted as job_accepted
from tests.support.tiny_tokenizer import byte_ids

LENGTH = FinishReason.LENGTH


def say(text: str, at: int = 0) -> TokenDelta:
    return TokenDelta(at, tuple(byte_ids(TOKENIZER, text)))


@dataclass
class Recorder:
    """A `Tap` that keeps what it takes, or raises."""

    is_open: bool = True
    error: Exception | None = None
    taken: list[TokenDelta] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append(delta)


def tapped(tap: Tap, num_choices: int = 1) -> Stream:
    stream = Stream(replace(make_stream(num_choices=num_choices).request, tap=tap), MAX_FAILURES)
    stream.begin_placement()
    stream.take(DECODE, job_accepted())
    return stream


async def waiting_reader(stream: Stream) -> "asyncio.Task[object]":
    """Return a reader that has got all there is."""
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not reading.done()
    return reading


async def test_a_waiting_reader_sleeps_on_while_the_tap_takes_tokens() -> None:
    tap = Recorder()
    stream = tapped(tap)
    reading = await waiting_reader(stream)
    stream.take(DECODE, tokens(0, [7], []))
    stream.take(DECODE, tokens(1, [8, 9], [7]))
    stream.take(DECODE, tokens(1, [8, 9], [7]))  # a repetition
    assert tap.taken == [TokenDelta(0, (7,)), TokenDelta(1, (8, 9))]
    await asyncio.sleep(0)
    assert not reading.done()
    stream.take(DECODE, finished(3))
    assert await reading == EndOfChoice(LENGTH, 3)


async def test_nothing_is_tapped_before_the_reader_has_what_came_before() -> None:
    tap = Recorder()
    stream = tapped(tap)
    stream.take(DECODE, tokens(0, [7], []))  # nobody reads yet
    assert await stream.next() == TokenDelta(0, (7,))
    stream.take(DECODE, tokens(1, [8], [7]))  # the reader is still at it
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert await reading == TokenDelta(1, (8,))
    assert tap.taken == []


async def test_what_a_closed_tap_does_not_take_is_read_with_what_follows() -> None:
    tap = Recorder(is_open=False)
    stream = tapped(tap)
    reading = await waiting_reader(stream)
    stream.take(DECODE, tokens(0, [7], []))
    tap.is_open = True
    stream.take(DECODE, tokens(1, [8], [7]))  # the reader has been woken for the first
    assert await reading == TokenDelta(0, (7, 8))
    assert tap.taken == []


async def test_no_token_is_tapped_behind_an_end_that_was_not_read() -> None:
    tap = Recorder()
    stream = tapped(tap, num_choices=2)
    reading = await waiting_reader(stream)
    stream.take(DECODE, tokens(0, [7], [], choice=0))
    stream.take(DECODE, finished(1, choice=0))
    stream.take(DECODE, tokens(0, [9], [], choice=1))
    assert tap.taken == [TokenDelta(0, (7,))]
    assert await reading == EndOfChoice(LENGTH, 1)
    assert await stream.next() == TokenDelta(0, (9,), choice=ChoiceIndex(1))


async def test_a_lost_placement_is_told_to_the_reader_behind_tapped_tokens() -> None:
    tap = Recorder()
    stream = tapped(tap)
    reading = await waiting_reader(stream)
    stream.take(DECODE, tokens(0, [7], []))
    stream.lose(DECODE, GONE)
    assert await reading == GONE
    assert tap.taken == [TokenDelta(0, (7,))]
    assert stream.choices.all[0].shown == [7]


async def test_what_the_tap_raises_is_the_readers() -> None:
    stream = tapped(Recorder(error=ValueError("a mistake of ours")))
    reading = await waiting_reader(stream)
    assert stream.take(DECODE, tokens(0, [7], []))  # the feed goes on
    with pytest.raises(ValueError, match="mistake"):
        await reading


class TappingEngine(PlayedEngine):
    """Gives all but the first event to the tap, and ends when it is told that nobody needs more."""

    def __init__(self, *rest: TokenDelta) -> None:
        super().__init__([say("a"), *rest])
        self._rest = rest
        self._is_over = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        tap = request.tap
        assert tap is not None
        assert not tap.is_open  # the first token is the reader's
        yield say("a")
        assert tap.is_open
        for delta in self._rest:
            tap.take(delta)
        await self._is_over.wait()

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        super().end_choice(request, choice)
        self._is_over.set()


async def test_an_answer_that_ends_in_its_tap_is_over() -> None:
    engine, sink = TappingEngine(say("b", 1), say("ST", 2)), SeenSink()
    await Answer(accepted(stops=["ST"]), engine, sink, record()).read(max_silence_s=5.0)
    assert (sink.text(), sink.ends) == ("ab", [(0, "stop")])
    assert engine.ended == [(RequestId("r"), ChoiceIndex(0))]


async def test_a_full_sink_closes_the_tap() -> None:
    class FullSink(SeenSink):
        """Has no room any more."""

        is_full = True
        num_waits = 0

        async def room(self) -> None:
            self.num_waits += 1

    class AskingEngine(PlayedEngine):
        was_open = True

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            assert request.tap is not None
            yield say("a")
            self.was_open = request.tap.is_open
            yield EndOfChoice(LENGTH, 1)

    engine, sink = AskingEngine([]), FullSink()
    await Answer(accepted(), engine, sink, record()).read(max_silence_s=5.0)
    assert not engine.was_open
    assert sink.num_waits == 1


async def test_tapped_tokens_break_the_silence() -> None:
    """Every wait of the reader lasts longer than the silence that is allowed."""

    class SteadyEngine(PlayedEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
            tap = request.tap
            assert tap is not None
            yield say("a")
            for index in range(1, 5):
                await asyncio.sleep(0.1)  # the time that is measured
                tap.take(say("b", index))
            yield EndOfChoice(LENGTH, 5)

    sink = SeenSink()
    await Answer(accepted(), SteadyEngine([]), sink, record()).read(max_silence_s=0.3)
    assert sink.text() == "abbbb"


async def test_a_choice_that_the_tap_ends_is_not_read_on() -> None:
    class Ending(Recorder):
        def take(self, delta: TokenDelta) -> None:
            super().take(delta)
            stream.end_choice(ChoiceIndex(0))

    ending = Ending()
    stream = tapped(ending, num_choices=2)
    await waiting_reader(stream)
    many = list(range(MAX_READ + 10))
    stream.take(DECODE, tokens(0, many, []))
    assert [len(delta.token_ids) for delta in ending.taken] == [MAX_READ]
    assert not stream.choices.has_news
