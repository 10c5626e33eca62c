"""A client that lags far behind: what waits for it is read in portions, each token and each logprob once."""

from common.messages.logprobs import TokenLogprobs
from gateway.choice import MAX_READ
from gateway.engine import EndOfChoice, TokenDelta
from gateway.streams import Stream, StreamItem
from proto import worker_pb2 as pb
from tests.support.stream_events import DECODE, accepted, finished, make_stream, tokens

NUM_TOKENS = 3 * MAX_READ + 7
IDS = [3 + number % 300 for number in range(NUM_TOKENS)]


async def read_all(stream: Stream) -> list[StreamItem]:
    items: list[StreamItem] = []
    while (item := await stream.next()) is not None:
        items.append(item)
    return items


def deltas_of(items: list[StreamItem]) -> list[TokenDelta]:
    return [item for item in items if isinstance(item, TokenDelta)]


async def test_it_is_read_in_portions() -> None:
    stream = make_stream(max_tokens=NUM_TOKENS)
    stream.take(DECODE, accepted())
    for index, token_id in enumerate(IDS):
        assert stream.take(DECODE, tokens(index, [token_id], IDS[:index]))
    stream.take(DECODE, finished(NUM_TOKENS))
    items = await read_all(stream)
    deltas = deltas_of(items)
    assert [len(delta.token_ids) for delta in deltas] == [MAX_READ, MAX_READ, MAX_READ, 7]
    assert [delta.index for delta in deltas] == [0, MAX_READ, 2 * MAX_READ, 3 * MAX_READ]
    assert [token for delta in deltas for token in delta.token_ids] == IDS
    assert isinstance(items[-1], EndOfChoice)
    assert items[-1].num_generated == NUM_TOKENS


async def test_logprobs_go_with_their_tokens() -> None:
    stream = make_stream(max_tokens=NUM_TOKENS, num_logprobs=2)
    stream.take(DECODE, accepted())
    for index in range(NUM_TOKENS):
        top = ([index, index + 1], [-0.5, -1.0]) if index % 2 else ([], [])
        entry = pb.TokenLogprobs(logprob=-float(index), top_ids=top[0], top_logprobs=top[1])
        assert stream.take(DECODE, tokens(index, [IDS[index]], IDS[:index], logprobs=[entry]))
    stream.take(DECODE, finished(NUM_TOKENS))
    told = [logprobs for delta in deltas_of(await read_all(stream)) for logprobs in delta.logprobs]
    assert told == [
        TokenLogprobs(-float(index), ((index, -0.5), (index + 1, -1.0)) if index % 2 else ())
        for index in range(NUM_TOKENS)
    ]


async def test_choices_that_lag_are_read_in_turn() -> None:
    stream = make_stream(max_tokens=NUM_TOKENS, num_choices=2)
    stream.take(DECODE, accepted())
    for choice in range(2):
        stream.take(DECODE, tokens(0, IDS, [], choice=choice))
        stream.take(DECODE, finished(NUM_TOKENS, choice=choice))
    items = deltas_of(await read_all(stream))
    assert [item.choice for item in items] == [0, 1] * 4
    for choice in range(2):
        assert [token for item in items if item.choice == choice for token in item.token_ids] == IDS
