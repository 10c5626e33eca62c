"""A stream of several choices: each is told on its own, and the request is over with the last of them."""

import pytest

from common.messages.codec import pack_ids
from common.messages.ids import ChoiceIndex
from common.messages.job import OpenChoice
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, StageTimes, TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.streams import Stream
from proto import worker_pb2 as pb
from tests.support.stream_events import (
    DECODE,
    GONE,
    MAX_FAILURES,
    OTHER,
    PREFILL,
    accepted,
    drain,
    finished,
    make_stream,
    tokens,
)

FIRST, SECOND, THIRD = ChoiceIndex(0), ChoiceIndex(1), ChoiceIndex(2)
LENGTH = FinishReason.LENGTH


def accepted_stream(num_choices: int = 2) -> Stream:
    """Return a stream whose worker has accepted it."""
    stream = make_stream(num_choices=num_choices)
    stream.take(DECODE, accepted())
    return stream


async def test_choices_are_told_apart() -> None:
    stream = accepted_stream()
    for event in (tokens(0, [7], []), tokens(0, [9], [], choice=1), tokens(1, [8], [7]), tokens(1, [4], [9], choice=1)):
        assert stream.take(DECODE, event)
    assert await drain(stream, 2) == [TokenDelta(0, (7, 8)), TokenDelta(0, (9, 4), choice=SECOND)]


async def test_the_answer_is_over_with_its_last_choice() -> None:
    stream = accepted_stream()
    for event in (tokens(0, [7], []), finished(1), tokens(0, [9], [], choice=1)):
        stream.take(DECODE, event)
    assert await drain(stream, 3) == [
        TokenDelta(0, (7,)),
        TokenDelta(0, (9,), choice=SECOND),
        EndOfChoice(LENGTH, 1),
    ]
    assert not stream.is_finished
    stream.take(DECODE, finished(1, "stop", choice=1))
    assert stream.is_finished
    assert await drain(stream, 2) == [EndOfChoice(FinishReason.STOP, 1, choice=SECOND), None]


async def test_readers_come_to_every_choice() -> None:
    """One that has something new all the time does not keep the others waiting."""
    stream = accepted_stream()
    stream.take(DECODE, tokens(0, [7], []))
    stream.take(DECODE, tokens(0, [9], [], choice=1))
    assert await drain(stream, 1) == [TokenDelta(0, (7,))]
    stream.take(DECODE, tokens(1, [8], [7]))
    assert await drain(stream, 2) == [TokenDelta(0, (9,), choice=SECOND), TokenDelta(1, (8,))]


async def test_a_lost_worker_is_one_failure() -> None:
    stream = make_stream(num_choices=3)
    for placement in range(1, MAX_FAILURES):
        stream.take(DECODE, accepted(placement))
        stream.note_loss(GONE)
        assert stream.budget.num_failures == stream.budget.num_deaths == placement
        stream.begin_placement()


async def test_the_next_placement_continues_each_choice_that_goes_on() -> None:
    stream = accepted_stream(3)
    for event in (tokens(0, [7], []), tokens(0, [9, 4], [], choice=1), finished(2, choice=1)):
        stream.take(DECODE, event)
    stream.lose(DECODE, GONE)
    assert stream.choices.to_continue == (OpenChoice(FIRST, pack_ids([7])), OpenChoice(THIRD))
    stream.begin_placement()
    stream.take(OTHER, accepted(2))
    assert stream.take(OTHER, tokens(0, [9, 4, 3], [], choice=1, placement=2)), "ignored: it has ended"
    stream.take(OTHER, tokens(1, [8], [7], placement=2))
    stream.take(OTHER, tokens(0, [5], [], choice=2, placement=2))
    assert [choice.shown for choice in stream.choices.all] == [[7, 8], [9, 4], [5]]


async def test_choices_of_which_only_the_end_was_lost_are_over() -> None:
    stream = accepted_stream()
    stream.take(DECODE, tokens(0, [7, 2], []))
    stream.take(DECODE, tokens(0, [9], [], choice=1))
    stream.lose(DECODE, GONE)
    assert await drain(stream, 3) == [TokenDelta(0, (7, 2)), TokenDelta(0, (9,), choice=SECOND), GONE]
    stream.finish_shown()
    assert await drain(stream, 2) == [EndOfChoice(FinishReason.STOP, 2), GONE]
    assert stream.choices.to_continue == (OpenChoice(SECOND, pack_ids([9])),)


async def test_nothing_more_is_read_of_a_choice_that_nobody_needs() -> None:
    stream = accepted_stream()
    stream.take(DECODE, tokens(0, [7], []))
    stream.take(DECODE, tokens(0, [9], [], choice=1))
    assert stream.end_choice(FIRST)
    assert not stream.end_choice(FIRST), "it is over"
    assert stream.take(DECODE, tokens(1, [8], [7])), "its worker may not have heard of it"
    assert stream.take(DECODE, finished(2))
    assert await drain(stream, 1) == [TokenDelta(0, (9,), choice=SECOND)]
    stream.take(DECODE, finished(1, choice=1))
    assert await drain(stream, 2) == [EndOfChoice(LENGTH, 1, choice=SECOND), None]


async def test_the_end_of_a_choice_that_nobody_needs_is_not_read_either() -> None:
    stream = accepted_stream(1)
    stream.take(DECODE, tokens(0, [7], []))
    assert await drain(stream, 1) == [TokenDelta(0, (7,))]
    stream.take(DECODE, finished(1))
    assert not stream.end_choice(FIRST)
    assert await drain(stream, 1) == [None]


async def test_with_the_last_needed_choice_nothing_is_waited_for() -> None:
    stream = make_stream(num_choices=2)
    assert stream.end_choice(FIRST)
    assert stream.is_awaited
    assert stream.end_choice(SECOND)
    assert not stream.is_awaited
    assert not stream.take(DECODE, accepted()), "its worker is to release it"
    assert await drain(stream, 1) == [None]


async def test_a_choice_that_nobody_needs_is_in_no_later_placement() -> None:
    stream = accepted_stream()
    stream.end_choice(FIRST)
    assert stream.unwanted == [FIRST]
    stream.lose(DECODE, GONE)
    assert stream.choices.to_continue == (OpenChoice(SECOND),)
    stream.begin_placement()
    assert stream.unwanted == []


async def test_an_early_copy_is_of_the_choice_that_it_names() -> None:
    stream = accepted_stream()
    stream.take(PREFILL, tokens(0, [9], [], choice=1, early=True))
    stream.take(PREFILL, tokens(0, [9], [], choice=2, early=True))
    assert await drain(stream, 1) == [TokenDelta(0, (9,), choice=SECOND)]


@pytest.mark.parametrize(
    "event",
    [tokens(0, [7], [], choice=2), finished(0, choice=2), finished(0, "because")],
    ids=["tokens of nobody", "an end of nobody", "an end for no reason"],
)
async def test_nonsense_loses_the_placement(event: pb.FeedEvent) -> None:
    stream = accepted_stream()
    assert stream.take(DECODE, event)
    (lost,) = await drain(stream, 1)
    assert isinstance(lost, PlacementLost)
    assert lost.reason is LossReason.REFUSED


async def test_an_event_of_a_kind_to_come_changes_nothing() -> None:
    stream = accepted_stream()
    assert stream.take(DECODE, pb.FeedEvent(request="r", placement=1))
    stream.take(DECODE, tokens(0, [7], []))
    assert await drain(stream, 1) == [TokenDelta(0, (7,))]


async def test_an_end_tells_where_the_time_went() -> None:
    now_s = 100.0
    base = make_stream().request
    request = GenerateRequest(base.request, base.model, base.prompt_ids, base.sampling, num_choices=2)
    stream = Stream(request, MAX_FAILURES, clock=lambda: now_s)
    stream.begin_placement()
    now_s += 1.5
    stream.take(DECODE, accepted())
    now_s += 10.0
    told = pb.StageTimes(wait_s=0.5, prefill_s=2.0, transfer_s=1.0, decode_s=6.0)
    stream.take(DECODE, finished(0, times=told))
    stream.take(DECODE, finished(0, choice=1))
    assert await drain(stream, 2) == [
        EndOfChoice(LENGTH, 0, times=StageTimes(1.5, 0.5, 2.0, 1.0, 6.0)),
        EndOfChoice(LENGTH, 0, choice=SECOND),
    ]
