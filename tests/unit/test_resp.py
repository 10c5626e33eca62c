"""Redis' protocol as this process reads and writes it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import BusyLoadingError, NoScriptError, ReadOnlyError, ResponseError

from common.broker.resp import MalformedReply, ReplyReader, command_bytes

REPLIES = b"$3\r\na\r\n\r\n$-1\r\n:-7\r\n+OK\r\n*-1\r\n*3\r\n$0\r\n\r\n*2\r\n:1\r\n$1\r\nx\r\n:2\r\n*0\r\n"
VALUES = [b"a\r\n", None, -7, b"OK", None, [b"", [1, b"x"], 2], []]


def test_a_command_counts_bytes() -> None:
    assert command_bytes(("SET", b"\r\n", "é", 7, 0.5)) == (
        b"*5\r\n$3\r\nSET\r\n$2\r\n\r\n\r\n$2\r\n\xc3\xa9\r\n$1\r\n7\r\n$3\r\n0.5\r\n"
    )


@given(st.lists(st.integers(0, len(REPLIES)), max_size=8))
def test_replies_are_whole_wherever_their_bytes_are_cut(cuts: list[int]) -> None:
    reader = ReplyReader()
    places = [0, *sorted(cuts), len(REPLIES)]
    pieces = [REPLIES[start:end] for start, end in itertools.pairwise(places)]
    assert [value for piece in pieces for value in reader.feed(piece)] == VALUES


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"-NOSCRIPT No matching script.", NoScriptError),
        (b"-READONLY You can't write", ReadOnlyError),
        (b"-LOADING Redis is loading", BusyLoadingError),
        (b"-ERR wrong number", ResponseError),
    ],
)
def test_what_redis_tells_of(line: bytes, kind: type[Exception]) -> None:
    [error] = ReplyReader().feed(line + b"\r\n")
    assert type(error) is kind
    assert str(error) == line[1:].decode()


@pytest.mark.parametrize("received", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"\r\n"])
def test_whoever_is_no_redis_is_found_out(received: bytes) -> None:
    with pytest.raises(MalformedReply):
        ReplyReader().feed(received)
