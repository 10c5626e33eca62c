"""Logprobs in a gateway's stream: one per token, read with it and then forgotten; those of the prompt once."""

import gc
import math
import tracemalloc
from itertools import islice

import pytest

from common.errors import GenerationFailed
from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import ChoiceIndex
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_of
from gateway import prompt_logprobs
from gateway.engine import TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.streams import Stream
from proto import worker_pb2 as pb
from tests.support.stream_events import DECODE, GONE, OTHER, PREFILL, accepted, drain, make_stream, tokens


def logprob(value: float, *top: tuple[int, float]) -> pb.TokenLogprobs:
    """Return one entry; values are multiples of 1/8, so that they are exact."""
    ids, values = [token for token, _ in top], [value for _, value in top]
    return pb.TokenLogprobs(logprob=value, top_ids=ids, top_logprobs=values)


def accepted_stream(
    *, num_logprobs: int | None = None, num_prompt_logprobs: int | None = None, num_choices: int = 1
) -> Stream:
    """Return a stream whose worker has accepted it."""
    stream = make_stream(num_logprobs=num_logprobs, num_prompt_logprobs=num_prompt_logprobs, num_choices=num_choices)
    stream.take(DECODE, accepted())
    return stream


async def test_every_token_has_its_own() -> None:
    stream = accepted_stream(num_logprobs=2)
    first, second = logprob(-0.5, (7, -0.5), (9, -1.25)), logprob(-2.0, (4, -0.125), (8, -2.0))
    stream.take(DECODE, tokens(0, [7], [], logprobs=[first]))
    stream.take(DECODE, tokens(1, [8], [7], logprobs=[second]))
    expected = (
        TokenLogprobs(-0.5, ((7, -0.5), (9, -1.25))),
        TokenLogprobs(-2.0, ((4, -0.125), (8, -2.0))),
    )
    assert await drain(stream, 1) == [TokenDelta(0, (7, 8), logprobs=expected)]
    stream.take(DECODE, tokens(2, [3], [7, 8], logprobs=[logprob(-0.25)]))
    assert await drain(stream, 1) == [TokenDelta(2, (3,), logprobs=(TokenLogprobs(-0.25),))]


async def test_what_is_repeated_has_them_once() -> None:
    stream = accepted_stream(num_logprobs=0)
    stream.take(PREFILL, tokens(0, [7], [], early=True, logprobs=[logprob(-0.5)]))
    stream.take(DECODE, tokens(0, [7, 8], [], logprobs=[logprob(-0.75), logprob(-1.0)]))
    assert await drain(stream, 1) == [TokenDelta(0, (7, 8), logprobs=(TokenLogprobs(-0.5), TokenLogprobs(-1.0)))]


async def test_impossible_tokens_have_minus_infinity() -> None:
    stream = accepted_stream(num_logprobs=1)
    stream.take(DECODE, tokens(0, [7], [], logprobs=[logprob(-math.inf, (9, 0.0))]))
    assert await drain(stream, 1) == [TokenDelta(0, (7,), logprobs=(TokenLogprobs(-math.inf, ((9, 0.0),)),))]


async def test_nobody_gets_what_was_not_asked_for() -> None:
    stream = accepted_stream()
    stream.take(DECODE, tokens(0, [7], [], logprobs=[logprob(-0.5)], prompt_logprobs=[logprob(-1.0)]))
    assert await drain(stream, 1) == [TokenDelta(0, (7,))]


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
async def test_tokens_without_their_logprobs_lose_the_placement(num_logprobs: int) -> None:
    stream = accepted_stream(num_logprobs=2)
    stream.take(DECODE, tokens(0, [7, 8], [], logprobs=[logprob(-0.5)] * num_logprobs))
    await assert_refused(stream)


@pytest.mark.parametrize(
    "entry",
    [
        logprob(math.nan),
        logprob(-1.0, (3, math.nan)),
        logprob(-1.0, (3, -1.0), (4, -2.0), (5, -3.0)),
        pb.TokenLogprobs(logprob=-1.0, top_ids=[3, 4], top_logprobs=[-1.0]),
    ],
    ids=["no number", "an alternative without a number", "too many alternatives", "alternatives without a logprob"],
)
async def test_logprobs_that_make_no_sense_lose_the_placement(entry: pb.TokenLogprobs) -> None:
    stream = accepted_stream(num_logprobs=2)
    stream.take(DECODE, tokens(0, [7, 8], [], logprobs=[logprob(-0.5), entry]))
    await assert_refused(stream)


async def test_an_early_copy_without_logprobs_waits_for_its_author() -> None:
    stream = accepted_stream(num_logprobs=0)
    assert stream.take(PREFILL, tokens(0, [7], [], early=True))
    stream.take(DECODE, tokens(0, [7], [], logprobs=[logprob(-0.5)]))
    assert await drain(stream, 1) == [TokenDelta(0, (7,), logprobs=(TokenLogprobs(-0.5),))]


class TestOfThePrompt:
    async def test_they_come_with_the_first_delta(self) -> None:
        stream = accepted_stream(num_prompt_logprobs=1, num_choices=2)
        stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(-1.5, (6, -1.5))]))
        stream.take(DECODE, tokens(0, [9], [], choice=1))
        prompt = (TokenLogprobs(-1.5, ((6, -1.5),)),)
        assert await drain(stream, 2) == [
            TokenDelta(0, (7,), prompt_logprobs=prompt),
            TokenDelta(0, (9,), choice=ChoiceIndex(1)),
        ]
        stream.take(DECODE, tokens(1, [8], [7]))
        assert await drain(stream, 1) == [TokenDelta(1, (8,))]

    @pytest.mark.parametrize("num_logprobs", [0, 2])
    async def test_a_wrong_number_of_them_loses_the_placement(self, num_logprobs: int) -> None:
        stream = accepted_stream(num_prompt_logprobs=0)
        stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(-1.0)] * num_logprobs))
        await assert_refused(stream)

    async def test_a_prompt_of_one_token_has_none(self) -> None:
        stream = make_stream(prompt=[5], num_prompt_logprobs=3)
        stream.take(DECODE, accepted())
        stream.take(DECODE, tokens(0, [7], []))
        assert await drain(stream, 1) == [TokenDelta(0, (7,))]
        assert stream.choices.sampling.num_prompt_logprobs is None

    async def test_a_later_placement_asks_for_them_until_they_are_here(self) -> None:
        stream = accepted_stream(num_prompt_logprobs=0)
        stream.lose(DECODE, GONE)
        assert stream.choices.sampling.num_prompt_logprobs == 0
        stream.begin_placement()
        stream.take(OTHER, accepted(2))
        stream.take(OTHER, tokens(0, [7], [], placement=2, prompt_logprobs=[logprob(-1.0)]))
        assert await drain(stream, 1) == [TokenDelta(0, (7,), prompt_logprobs=(TokenLogprobs(-1.0),))]

    async def test_those_of_a_long_prompt_are_read_when_they_are_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[pb.TokenLogprobs] = []

        def noted(message: pb.TokenLogprobs) -> TokenLogprobs:
            read.append(message)
            return logprobs_of(message)

        monkeypatch.setattr(prompt_logprobs, "logprobs_of", noted)
        stream = make_stream(prompt=[5] * 10_001, num_prompt_logprobs=0)
        stream.take(DECODE, accepted())
        stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(-1.0)] * 10_000))
        [delta] = await drain(stream, 1)
        assert isinstance(delta, TokenDelta)
        assert (len(delta.prompt_logprobs), read) == (10_000, [])
        assert list(islice(delta.prompt_logprobs, 10)) == [TokenLogprobs(-1.0)] * 10
        assert len(read) == 10

    async def test_what_is_no_logprob_fails_whoever_reads_it(self) -> None:
        stream = accepted_stream(num_prompt_logprobs=0)
        stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(math.nan)]))
        [delta] = await drain(stream, 1)
        assert isinstance(delta, TokenDelta)
        with pytest.raises(GenerationFailed, match="cannot be read"):
            list(delta.prompt_logprobs)


async def test_an_early_copy_waits_for_the_logprobs_of_the_prompt() -> None:
    stream = accepted_stream(num_prompt_logprobs=0)
    assert stream.take(PREFILL, tokens(0, [7], [], early=True))
    assert stream.choices.nums_shown == [0]
    stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(-1.0)]))
    assert await drain(stream, 1) == [TokenDelta(0, (7,), prompt_logprobs=(TokenLogprobs(-1.0),))]


async def test_a_later_placement_does_not_ask_for_them_again() -> None:
    stream = accepted_stream(num_prompt_logprobs=0)
    stream.take(DECODE, tokens(0, [7], [], prompt_logprobs=[logprob(-1.0)]))
    stream.lose(DECODE, GONE)
    assert stream.choices.sampling.num_prompt_logprobs is None
    stream.begin_placement()
    stream.take(OTHER, accepted(2))
    stream.take(OTHER, tokens(1, [8], [7], placement=2))
    assert await drain(stream, 1) == [TokenDelta(0, (7, 8), prompt_logprobs=(TokenLogprobs(-1.0),))]


async def test_a_reader_that_lags_costs_bytes_per_token_with_logprobs_too() -> None:
    num_tokens, num_top = 5_000, 5
    entry = logprob(-0.5, *((token, -1.0) for token in range(num_top)))
    stream = make_stream(max_tokens=num_tokens, num_logprobs=num_top)
    stream.take(DECODE, accepted())
    chain, events = EMPTY_CHAIN, []
    for index in range(num_tokens):
        frame = pb.Tokens(index=index, ids=[index], chain=chain, logprobs=[entry])
        events.append(pb.FeedEvent(request="r", placement=1, tokens=frame))
        chain = extend_chain(chain, index)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for event in events:
            assert stream.take(DECODE, event)
        unread, _ = tracemalloc.get_traced_memory()
        num_read = 0
        while num_read < num_tokens:
            (delta,) = await drain(stream, 1)
            assert isinstance(delta, TokenDelta)
            num_read += len(delta.logprobs)
        del delta
        gc.collect()  # the interpreter keeps some freed tuples otherwise
        read, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert unread - before < (64 + 8 * num_top + 16) * num_tokens
    assert read - before < 64 * num_tokens, "what was read is still held"


async def assert_refused(stream: Stream) -> None:
    """Nothing was shown, and the placement is lost."""
    (lost,) = await drain(stream, 1)
    assert isinstance(lost, PlacementLost)
    assert lost.reason is LossReason.REFUSED
    assert stream.choices.nums_shown == [0]
