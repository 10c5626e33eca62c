"""Divides the cores of a host among its workers: two workers on one core halve each other, and threads that outnumber
the cores wait for each other."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one worker gets: the cores it is pinned to (none: not pinned) and its number of threads."""

    cores: tuple[int, ...]
    num_threads: int
    borrowed: tuple[int, ...] = ()
    """Cores of other workers, for as long as those are idle."""


MAX_BORROWED = 8
"""A worker wakes a thread on each of these cores for every step, so that many more would delay it. Not tuned: measured
on two cores only."""


def share_cores(cores: Sequence[int], num_usable: int, num_workers: int, num_threads: int | None) -> list[CoreShare]:
    """Return one share per worker. Each borrows cores of the others, its neighbours' first.

    `num_usable` counts the cores that a quota lets run at once; with fewer of them than workers nobody is pinned.
    `num_threads` overrides the size of every share.
    """
    usable = cores[:num_usable] if num_usable == len(cores) else ()
    if len(usable) < num_workers:
        threads = num_threads or max(1, num_usable // max(1, num_workers))
        return [CoreShare((), threads)] * num_workers
    shares = []
    for worker in range(num_workers):
        first, behind = (len(usable) * edge // num_workers for edge in (worker, worker + 1))
        own = tuple(usable[first:behind])
        borrowed = (*usable[behind:], *usable[:first])[:MAX_BORROWED]
        shares.append(CoreShare(own, num_threads or len(own), borrowed))
    return shares
