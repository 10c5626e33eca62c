"""Stop strings in pieces of text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    if not matcher.has_matched:
        shown.append(matcher.finish())
    return shown, matcher.has_matched


def test_b006_stop_spanning_tokens() -> None:
    shown, matched = run(["DEFGHIJ"], ["AB", "CD", "EF", "GH", "I", "J x"])
    assert matched
    assert shown == ["AB", "C", "", "", "", ""]


def test_b006_text_behind_the_stop_is_dropped() -> None:
    assert run(["ST"], ["aSTb", "c"]) == (["a", ""], True)


def test_b006_one_stop_is_a_beginning_of_the_other() -> None:
    assert run(["ABC", "AB"], ["xA", "BC"]) == (["x", ""], True)


def test_b006_held_text_that_becomes_no_stop_is_shown() -> None:
    assert run(["DEFG"], ["ABC", "DE", "FX", "DE"]) == (["ABC", "", "DEFX", "", "DE"], False)


def test_b006_the_stop_completed_first_wins() -> None:
    assert run(["BCDE", "CD"], ["ABCDE"]) == (["AB"], True)


def test_without_stops_nothing_is_held() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", [["aa"], ["aab"], ["ab", "b"], ["aba", "ba"]])
@given(text=st.text("abc", max_size=12), data=st.data())
def test_b006_the_cut_does_not_matter(stops: list[str], text: str, data: st.DataObject) -> None:
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    edges = [0, *borders, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    shown, matched = run(stops, pieces)
    expected = next(
        (
            text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
            for end in range(len(text) + 1)
            if any(text[:end].endswith(stop) for stop in stops)
        ),
        None,
    )
    assert matched == (expected is not None)
    assert "".join(shown) == (text if expected is None else expected)
