"""Neighbouring pages grouped, so that they are moved as one span of bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.messages.ids import BlockId, Generation
from common.transfer.protocols import PageCopy


@dataclass(frozen=True, slots=True)
class Run:
    """`len(generations)` pages from `source` on go to as many from `target` on."""

    source: BlockId
    target: BlockId
    generations: tuple[Generation, ...]

    @property
    def num_pages(self) -> int:
        """Pages of the run."""
        return len(self.generations)


def runs_of(copies: Sequence[PageCopy], max_pages: int) -> Iterator[Run]:
    """Yield the copies, in order, as runs, neighbours in both pools, of at most `max_pages`."""
    start = 0
    for index in range(1, len(copies) + 1):
        if index == len(copies) or index - start == max_pages or not _are_neighbours(copies, index):
            run = copies[start:index]
            yield Run(run[0].source, run[0].target, tuple(copy.generation for copy in run))
            start = index


def _are_neighbours(copies: Sequence[PageCopy], index: int) -> bool:
    before, after = copies[index - 1], copies[index]
    return after.source == before.source + 1 and after.target == before.target + 1


def spans_of(pages: Sequence[BlockId], max_pages: int) -> Iterator[tuple[BlockId, int]]:
    """Yield the pages, in order, as (first, count) of at most `max_pages` neighbours."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or index - start == max_pages or pages[index] != pages[index - 1] + 1:
            yield pages[start], index - start
            start = index
