"""What waits for slow clients is bounded over all of them; the one furthest behind loses its answer."""

import pytest

from common.errors import ClientTooSlow
from gateway.choice import BYTES_PER_TOKEN
from gateway.engine import TokenDelta
from gateway.laggards import Laggards
from gateway.streams import Stream
from proto import worker_pb2 as pb
from tests.support.stream_events import DECODE, accepted, drain, finished, make_stream, tokens


def lagging(num_tokens: int, *, num_top: int | None = None, ends: bool = False) -> Stream:
    """Return a stream whose reader has read nothing of so many tokens."""
    stream = make_stream(max_tokens=10_000, num_logprobs=num_top)
    stream.take(DECODE, accepted())
    entry = pb.TokenLogprobs(logprob=-1.0, top_ids=range(num_top or 0), top_logprobs=[-1.0] * (num_top or 0))
    logprobs = [] if num_top is None else [entry] * num_tokens
    assert stream.take(DECODE, tokens(0, [7] * num_tokens, [], logprobs=logprobs))
    if ends:
        stream.take(DECODE, finished(num_tokens))
    return stream


def test_logprobs_count_for_more_than_ids() -> None:
    assert lagging(100).num_unread_bytes == 100 * BYTES_PER_TOKEN
    assert lagging(100, num_top=20).num_unread_bytes == 100 * (BYTES_PER_TOKEN + 6 + 160)


@pytest.mark.parametrize("ends", [True, False], ids=["complete", "going on"])
async def test_the_furthest_behind_is_ended_and_the_others_lose_nothing(ends: bool) -> None:
    near, far = lagging(10), lagging(1000, ends=ends)
    laggards = Laggards(lambda: [near, far], 500 * BYTES_PER_TOKEN)
    laggards.look()
    assert far.num_unread_bytes == 0
    with pytest.raises(ClientTooSlow):
        await far.next()
    assert not far.take(DECODE, tokens(1000, [7], [7] * 1000)), "its worker is told to stop"
    assert await drain(near, 1) == [TokenDelta(0, (7,) * 10)]


async def test_nobody_is_ended_below_the_bound() -> None:
    streams = [lagging(100) for _ in range(4)]
    Laggards(lambda: streams, 400 * BYTES_PER_TOKEN).look()
    for stream in streams:
        assert await drain(stream, 1) == [TokenDelta(0, (7,) * 64)]


async def test_no_more_are_ended_than_must_be() -> None:
    streams = [lagging(100 + number) for number in range(4)]
    Laggards(lambda: streams, 210 * BYTES_PER_TOKEN).look()
    assert [stream.num_unread_bytes > 0 for stream in streams] == [True, True, False, False]


async def test_what_was_read_does_not_count() -> None:
    stream = lagging(100)
    await drain(stream, 2)
    assert stream.num_unread_bytes == 0
