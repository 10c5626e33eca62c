"""Behind the end of its placement a stream shows nothing more."""

from gateway.engine import EndOfChoice, FinishReason, TokenDelta
from tests.support.stream_events import DECODE, PREFILL, accepted, drain, finished, make_stream, tokens


async def test_an_early_copy_behind_the_end_changes_nothing() -> None:
    stream = make_stream()
    for event in (accepted(), tokens(0, [7], []), finished(1, "stop")):
        stream.take(DECODE, event)
    stream.take(PREFILL, tokens(1, [8], [7], early=True))
    assert await drain(stream, 3) == [TokenDelta(0, (7,)), EndOfChoice(FinishReason.STOP, 1), None]
