"""The client of the gateway's bench finds a token that is missing, doubled or changed, however its bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gateway.client import HEAD_END, LAST_CHUNK, BrokenAnswer, Reading

PIECES = ["a", " bc", "d"]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + HEAD_END


def event(content: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % content.encode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def received(*contents: str, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return HEAD + chunked(*map(event, contents), end) + LAST_CHUNK


def reading(whole: bytes, cuts: list[int]) -> Reading:
    places = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    chunks = [whole[start:end] for start, end in itertools.pairwise(places)]
    return Reading(0.0, [float(number) for number in range(len(chunks))], chunks)


@given(st.lists(st.integers(len(HEAD), 10_000), max_size=6))
def test_every_token_has_the_time_of_its_last_byte(cuts: list[int]) -> None:
    whole = received("", *PIECES)
    one = reading(whole, cuts)
    ends = [whole.index(event(piece)) + len(event(piece)) for piece in PIECES]
    places = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    expected = [float(next(n for n, end in enumerate(places[1:]) if end >= place)) for place in ends]
    assert one.tokens(PIECES) == expected
    assert one.num_events == len(PIECES)


def test_tokens_that_share_an_event_are_told_apart() -> None:
    one = reading(received("a bc", "d"), [])
    assert one.tokens(PIECES) == [0.0, 0.0, 0.0]
    assert one.num_events == 2


@pytest.mark.parametrize(
    "broken",
    [
        received("a", "d"),
        received("a", " bc", " bc", "d"),
        received("a", " bx", "d"),
        received(*PIECES, end=b""),
        received(*PIECES, end=b'data: {"error":{}}\n\n'),
        HEAD.replace(b"200", b"503") + LAST_CHUNK,
    ],
)
def test_what_is_not_the_script_is_found(broken: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        reading(broken, []).tokens(PIECES)
