"""What a started process has is not looked at again for cycles of garbage; new garbage still goes."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from common.lifecycle.garbage import YOUNG_OBJECTS, settle


@pytest.fixture(autouse=True)
def _collector_of_the_tests() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


class Node:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_left_out() -> None:
    settle()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] == YOUNG_OBJECTS


def test_new_cycles_are_collected() -> None:
    settle()
    node = weakref.ref(Node())
    kept: list[list[int]] = [[] for _ in range(2 * YOUNG_OBJECTS)]
    assert node() is None
    assert kept


def test_cycles_that_have_become_old_are_collected() -> None:
    loaded: list[list[int]] = [[] for _ in range(100 * YOUNG_OBJECTS)]
    settle()
    node = Node()
    found = weakref.ref(node)
    gc.collect(0)
    gc.collect(1)  # a request that two looks have seen
    del node
    kept: list[list[int]] = [[] for _ in range(12 * YOUNG_OBJECTS)]
    assert found() is None
    assert kept
    assert loaded
