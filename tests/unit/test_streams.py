"""A gateway's stream shows each token once, from the right worker and placement, and never a stitched continuation."""

import asyncio
import tracemalloc

import pytest

from common.errors import DeadlineExceeded, RequestCancelled, WorkerLost
from common.messages.chain import EMPTY_CHAIN, extend_chain
from gateway.choice import MAX_READ
from gateway.engine import EndOfChoice, FinishReason, TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.streams import PlacementFailed
from proto import worker_pb2 as pb
from tests.support.stream_events import (
    DECODE,
    GONE,
    OTHER,
    PREFILL,
    accepted,
    drain,
    finished,
    make_stream,
    tokens,
)


async def test_tokens_then_end() -> None:
    stream = make_stream()
    for event in (accepted(), tokens(0, [7], []), tokens(1, [8, 9], [7]), finished(3)):
        assert stream.take(DECODE, event)
    assert await drain(stream, 2) == [TokenDelta(0, (7, 8, 9)), EndOfChoice(FinishReason.LENGTH, 3)]


async def test_tokens_are_read_as_they_come() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    reading = asyncio.create_task(drain(stream, 1))
    await asyncio.sleep(0)
    stream.take(DECODE, tokens(0, [7], []))
    assert await reading == [TokenDelta(0, (7,))]
    stream.take(DECODE, tokens(1, [8, 9], [7]))
    assert await drain(stream, 1) == [TokenDelta(1, (8, 9))]


async def test_b107_a_reader_that_lags_costs_bytes_per_token() -> None:
    num_tokens = 20_000
    stream = make_stream(max_tokens=num_tokens)
    stream.take(DECODE, accepted())
    chain = EMPTY_CHAIN
    events = []
    for index in range(num_tokens):
        frame = pb.Tokens(index=index, ids=[index], chain=chain)
        events.append(pb.FeedEvent(request="r", placement=1, tokens=frame))
        chain = extend_chain(chain, index)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for event in events:
            assert stream.take(DECODE, event)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * num_tokens
    stream.take(DECODE, finished(num_tokens))
    *deltas, end = await drain(stream, -(-num_tokens // MAX_READ) + 1)
    assert [token for delta in deltas if isinstance(delta, TokenDelta) for token in delta.token_ids] == list(
        range(num_tokens)
    )
    assert [end] == [
        EndOfChoice(FinishReason.LENGTH, num_tokens),
    ]


async def test_tokens_behind_a_lost_feed_are_not_lost() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.lose(DECODE, GONE)
    stream.take(DECODE, tokens(0, [7], []))
    assert [type(item) for item in await drain(stream, 2)] == [TokenDelta, PlacementLost]
    stream.lose(DECODE, GONE)
    stream.take(DECODE, tokens(1, [8], [7]))
    stream.begin_placement()
    assert stream.choices.all[0].shown == [7, 8]
    assert await drain(stream, 1) == [TokenDelta(1, (8,))]


def cached(index: int, ids: list[int], before: list[int], num_cached: int, *, early: bool = False) -> pb.FeedEvent:
    event = tokens(index, ids, before, early=early)
    event.tokens.num_cached_tokens = num_cached
    return event


async def test_b053_the_first_frame_tells_what_was_cached() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(PREFILL, cached(0, [7], [], 32, early=True))
    assert await drain(stream, 1) == [TokenDelta(0, (7,), 32)]
    stream.take(DECODE, cached(0, [7], [], 32))
    stream.take(DECODE, tokens(1, [8], [7]))
    stream.take(DECODE, finished(2))
    assert await drain(stream, 2) == [TokenDelta(1, (8,), 32), EndOfChoice(FinishReason.LENGTH, 2, 32)]


async def test_b053_a_later_placement_s_hits_are_not_the_client_s() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, cached(0, [7], [], 0))
    stream.begin_placement()
    stream.take(OTHER, accepted(2))
    event = cached(1, [8], [7], 48)
    event.placement = 2
    stream.take(OTHER, event)
    assert await drain(stream, 1) == [TokenDelta(0, (7, 8), 0)]


async def test_the_early_copy_is_shown_once() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    assert stream.take(PREFILL, tokens(0, [7], [], early=True))
    assert stream.take(DECODE, tokens(0, [7], []))
    assert stream.take(DECODE, tokens(1, [8], [7]))
    assert await drain(stream, 1) == [TokenDelta(0, (7, 8))]
    assert stream.choices.all[0].shown == [7, 8]


async def test_a_late_early_copy_changes_nothing() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(0, [7], []))
    stream.take(PREFILL, tokens(0, [9], [], early=True))
    assert stream.choices.all[0].shown == [7]


async def test_an_early_copy_behind_the_end_changes_nothing() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, finished(0))
    stream.take(PREFILL, tokens(0, [7], [], early=True))
    assert await drain(stream, 1) == [EndOfChoice(FinishReason.LENGTH, 0)]


@pytest.mark.parametrize(
    "event", [tokens(0, [9], []), tokens(1, [8], [9])], ids=["repeats another token", "continues another token"]
)
async def test_a_diverging_worker_loses_the_placement(event: pb.FeedEvent) -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(PREFILL, tokens(0, [7], [], early=True))
    stream.take(DECODE, event)
    shown, lost = await drain(stream, 2)
    assert shown == TokenDelta(0, (7,))
    assert isinstance(lost, PlacementLost)
    assert stream.choices.all[0].shown == [7]


async def test_missing_frames_lose_the_placement() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(1, [8], [7]))
    assert isinstance((await drain(stream, 1))[0], PlacementLost)
    assert stream.choices.all[0].shown == []


async def test_tokens_that_the_model_does_not_have_lose_the_placement_and_are_not_shown() -> None:
    stream = make_stream(vocab_size=100)
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(0, [99], []))
    stream.take(DECODE, tokens(1, [98, 100], [99]))
    shown, lost = await drain(stream, 2)
    assert shown == TokenDelta(0, (99,))
    assert isinstance(lost, PlacementLost)
    assert (lost.reason, lost.text) == (LossReason.REFUSED, "token id 100 is outside the vocabulary of 100")
    assert stream.choices.all[0].shown == [99]  # what the next worker goes on with


async def test_an_acceptance_behind_the_tokens_binds_nobody() -> None:
    """The worker is told to stop when it speaks before its acceptance: nothing would come from it afterwards."""
    stream = make_stream()
    stream.target = DECODE
    assert not stream.take(DECODE, tokens(0, [7], []))
    assert not stream.take(DECODE, accepted())
    assert [type(item) for item in await drain(stream, 1)] == [PlacementLost]
    assert stream.source is None


async def test_a_loss_that_is_nobodys_failure_makes_no_suspect_of_a_waiting_job() -> None:
    """A feed that broke while this process was paused says nothing about what its worker did."""
    stream = make_stream()
    stream.lose(OTHER, PlacementLost(LossReason.LOST, "a pause of ours", is_failure=False))
    stream.give_up("nobody took it in")
    (loss,) = await drain(stream, 1)
    assert isinstance(loss, PlacementLost)
    assert not loss.is_failure


async def test_an_end_that_counts_more_tokens_loses_the_placement() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(0, [7], []))
    stream.take(DECODE, finished(2))
    assert isinstance((await drain(stream, 2))[1], PlacementLost)


async def test_old_placements_and_other_workers_are_outdated() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    assert not stream.take(OTHER, accepted())
    assert not stream.take(OTHER, tokens(0, [7], []))
    stream.begin_placement()
    assert not stream.take(DECODE, tokens(0, [7], [], placement=1))
    assert stream.choices.all[0].shown == []


async def test_the_next_placement_continues_what_was_shown() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(0, [7], []))
    stream.begin_placement()
    stream.take(OTHER, accepted(2))
    assert stream.take(OTHER, tokens(1, [8], [7], placement=2))
    assert stream.choices.all[0].shown == [7, 8]


async def test_failures_are_told_apart() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, pb.FeedEvent(placement=1, failed=pb.Failed(message="no pages", is_retryable=True)))
    assert await drain(stream, 1) == [PlacementLost(LossReason.FAILED, "no pages")]
    stream.begin_placement()
    stream.take(DECODE, accepted(2))
    stream.take(DECODE, pb.FeedEvent(placement=2, failed=pb.Failed(message="NaN", code="invalid_logits")))
    assert await drain(stream, 1) == [PlacementFailed("invalid_logits", "NaN")]


async def test_the_first_ending_counts() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.lose(DECODE, GONE)
    stream.take(DECODE, finished(0))
    assert await drain(stream, 1) == [GONE]


async def test_the_first_loss_counts() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.lose(DECODE, GONE)
    stream.take(DECODE, pb.FeedEvent(placement=1, failed=pb.Failed(message="NaN", code="invalid_logits")))
    assert await drain(stream, 1) == [GONE]


async def test_only_the_holder_of_the_placement_can_lose_it() -> None:
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.lose(OTHER, PlacementLost(LossReason.LOST, "not ours"))
    stream.lose(DECODE, GONE)
    assert await drain(stream, 1) == [GONE]


async def test_a_lost_terminal_event_is_recognised() -> None:
    at_limit = make_stream(max_tokens=1)
    at_limit.take(DECODE, accepted())
    at_limit.take(DECODE, tokens(0, [7], []))
    at_limit.finish_shown()
    assert await drain(at_limit, 3) == [TokenDelta(0, (7,)), EndOfChoice(FinishReason.LENGTH, 1), None]
    stopped = make_stream()
    stopped.take(DECODE, accepted())
    stopped.take(DECODE, tokens(0, [2], []))
    stopped.finish_shown()
    assert await drain(stopped, 3) == [TokenDelta(0, (2,)), EndOfChoice(FinishReason.STOP, 1), None]
    open_yet = make_stream()
    open_yet.finish_shown()
    assert not open_yet.choices.is_complete


async def test_an_ended_request_shows_what_had_come_and_takes_nothing_more() -> None:
    """Otherwise tokens that keep coming would put its deadline off."""
    stream = make_stream()
    stream.take(DECODE, accepted())
    stream.take(DECODE, tokens(0, [7], []))
    stream.end(DeadlineExceeded("over"))
    assert not stream.take(DECODE, tokens(1, [8], [7]))
    assert await drain(stream, 1) == [TokenDelta(0, (7,))]
    with pytest.raises(DeadlineExceeded):
        await stream.next()


async def test_an_end_outlives_placements() -> None:
    """It comes while the next placement is being made."""
    stream = make_stream()
    stream.lose(DECODE, GONE)
    stream.end(RequestCancelled("by its id"))
    stream.begin_placement()
    assert not stream.is_awaited
    assert await stream.settles_within(0.0)
    with pytest.raises(RequestCancelled):
        await stream.next()


async def test_a_complete_answer_cannot_be_ended() -> None:
    stream = make_stream()
    for event in (accepted(), tokens(0, [7], []), finished(1)):
        stream.take(DECODE, event)
    stream.end(DeadlineExceeded("over"))
    assert await drain(stream, 2) == [TokenDelta(0, (7,)), EndOfChoice(FinishReason.LENGTH, 1)]


async def test_failures_and_deaths_are_told_apart() -> None:
    stream = make_stream()
    losses = [
        PlacementLost(LossReason.DRAINED, "it leaves", is_failure=False),
        PlacementLost(LossReason.LOST, "it may have been our pause", is_failure=False),
        PlacementLost(LossReason.FAILED, "no pages"),
    ]
    for loss in losses:
        stream.take(DECODE, accepted(stream.placement))
        stream.note_loss(loss)
        stream.begin_placement()
    assert (stream.budget.num_failures, stream.budget.is_suspect) == (1, False)
    assert stream.leaving == {DECODE}
    stream.take(OTHER, accepted(stream.placement))
    stream.note_loss(GONE)
    stream.take(OTHER, pb.FeedEvent(placement=stream.placement, try_lost=pb.TryLost(reason="it died")))
    with pytest.raises(WorkerLost, match="3 times, last because it died"):
        stream.raise_if_ended()


async def test_a_worker_that_died_before_it_accepted_costs_nothing_until_it_is_the_third() -> None:
    """A job that nobody had read cannot have killed anybody, and a queue of suspects would take turns."""
    stream = make_stream()
    for _ in range(2):
        stream.target = DECODE
        stream.lose(DECODE, GONE)
        assert await drain(stream, 1) == [GONE]
        stream.note_loss(GONE)
        stream.begin_placement()
    assert (stream.budget.num_failures, stream.budget.is_suspect) == (0, False)
    stream.target = DECODE
    stream.lose(DECODE, GONE)
    with pytest.raises(WorkerLost, match="3 workers"):
        stream.note_loss(GONE)
