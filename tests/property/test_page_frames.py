"""The codec of the TCP page server: what is packed comes back, and no bytes do anything but be malformed.

Kills the planted bugs reply-of-another-length and unbounded-request.
"""

import contextlib
import itertools
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import MalformedRecord
from common.messages.ids import BlockId, Epoch, Generation
from common.transfer import page_frames
from common.transfer.page_frames import MAX_PAGES, PageRef, Status
from common.transfer.pool_header import PoolHeader
from common.transfer.protocols import PageCopy
from common.transfer.runs import runs_of, spans_of

uint64 = st.integers(0, 2**64 - 1)
page_refs = st.lists(
    st.builds(PageRef, st.integers(0, 2**32 - 1).map(BlockId), uint64.map(Generation)), min_size=1, max_size=64
)
page_copies = st.lists(
    st.builds(
        PageCopy, st.integers(0, 5).map(BlockId), st.integers(0, 3).map(Generation), st.integers(0, 5).map(BlockId)
    ),
    max_size=20,
)


@given(epoch=uint64.map(Epoch), pages=page_refs)
def test_a_request_comes_back(epoch: Epoch, pages: list[PageRef]) -> None:
    data = page_frames.pack_request(epoch, pages)
    head = page_frames.unpack_request(data[: page_frames.REQUEST_BYTES])
    assert head == (len(pages), epoch)
    assert page_frames.unpack_pages(data[page_frames.REQUEST_BYTES :]) == pages


@given(status=st.sampled_from(Status), num_pages=st.integers(1, MAX_PAGES))
def test_a_reply_comes_back(status: Status, num_pages: int) -> None:
    assert page_frames.unpack_reply(page_frames.pack_reply(status, num_pages), num_pages) is status


@given(st.lists(uint64, max_size=64))
def test_generations_come_back(generations: list[int]) -> None:
    assert page_frames.unpack_generations(page_frames.pack_generations(generations)) == generations


@given(data=st.binary(max_size=64), num_requested=st.integers(1, MAX_PAGES))
@example(data=b"tpRq" + b"\xff" * 12, num_requested=1)
@example(data=b"tpRp\x07" + (1).to_bytes(4, "little"), num_requested=1)
def test_any_other_bytes_are_malformed_or_within_the_limits(data: bytes, num_requested: int) -> None:
    with contextlib.suppress(MalformedRecord):
        assert 0 < page_frames.unpack_request(data).num_pages <= MAX_PAGES
    readers: list[Callable[[], object]] = [
        lambda: page_frames.unpack_reply(data, num_requested),
        lambda: page_frames.unpack_pages(data),
        lambda: page_frames.unpack_generations(data),
        lambda: PoolHeader.unpack(data),
    ]
    for read in readers:
        with contextlib.suppress(MalformedRecord):
            read()


@given(data=st.binary(max_size=3), status=st.integers(3, 255))
def test_a_damaged_reply_is_malformed(data: bytes, status: int) -> None:
    whole = page_frames.pack_reply(Status.PAGES, 2)
    for damaged in (data, data + whole[len(data) + 1 :], whole[:4] + bytes([status]) + whole[5:], whole + b"x"):
        with pytest.raises(MalformedRecord):
            page_frames.unpack_reply(damaged, 2)
    with pytest.raises(MalformedRecord):
        page_frames.unpack_reply(whole, 3)


@given(copies=page_copies, max_pages=st.integers(1, 4))
def test_runs_are_the_copies_in_order(copies: list[PageCopy], max_pages: int) -> None:
    runs = list(runs_of(copies, max_pages))
    unrolled = [
        PageCopy(BlockId(run.source + i), generation, BlockId(run.target + i))
        for run in runs
        for i, generation in enumerate(run.generations)
    ]
    assert unrolled == copies
    assert all(run.num_pages <= max_pages for run in runs)


@given(pages=st.lists(st.integers(0, 9).map(BlockId), max_size=20), max_pages=st.integers(1, 4))
def test_spans_are_the_pages_in_order_and_as_long_as_possible(pages: list[BlockId], max_pages: int) -> None:
    spans = list(spans_of(pages, max_pages))
    assert [first + i for first, count in spans for i in range(count)] == pages
    assert all(1 <= count <= max_pages for _, count in spans)
    joins = itertools.pairwise(spans)
    assert not any(first + count == after and count < max_pages for (first, count), (after, _) in joins)
