"""The running hash over generated ids tells streams apart that differ anywhere."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from common.messages.chain import EMPTY_CHAIN, chain_of, extend_chain

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_short_streams_differ() -> None:
    streams = [list(stream) for length in range(5) for stream in product(range(5), repeat=length)]
    assert len({chain_of(stream) for stream in streams}) == len(streams)


@given(before=ids, token=st.integers(0, 2**32 - 1), other=st.integers(0, 2**32 - 1), behind=ids)
def test_one_other_token_is_in_every_later_chain(before: list[int], token: int, other: int, behind: list[int]) -> None:
    chains = [chain_of([*before, middle, *behind]) for middle in (token, other)]
    assert (chains[0] == chains[1]) is (token == other)


@given(before=ids, behind=ids)
def test_a_chain_goes_on_where_it_was_left(before: list[int], behind: list[int]) -> None:
    chain = chain_of(before)
    for token in behind:
        chain = extend_chain(chain, token)
    assert chain == chain_of(before + behind)
    assert EMPTY_CHAIN <= chain < 2**64, "it fits a frame's field"
