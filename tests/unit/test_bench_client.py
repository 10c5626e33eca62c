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


def places_of(whole: bytes, cuts: list[int]) -> list[int]:
    """Return where an answer is cut into chunks; its head comes at once."""
    return [0, *sorted(len(HEAD) + cut % (len(whole) - len(HEAD)) for cut in cuts), len(whole)]


def reading(whole: bytes, cuts: list[int]) -> Reading:
    places = places_of(whole, cuts)
    chunks = [whole[start:end] for start, end in itertools.pairwise(places)]
    return Reading(0.0, [float(number) for number in range(len(chunks))], chunks)


@given(st.lists(st.integers(0, 10_000), max_size=6))
def test_every_token_has_the_time_of_its_last_byte(cuts: list[int]) -> None:
    whole = received("", *PIECES)
    one = reading(whole, cuts)
    ends = [whole.index(event(piece)) + len(event(piece)) for piece in PIECES]
    chunk_ends = places_of(whole, cuts)[1:]
    expected = [float(next(n for n, chunk_end in enumerate(chunk_ends) if chunk_end >= end)) for end in ends]
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
