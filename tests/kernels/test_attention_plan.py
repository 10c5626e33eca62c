"""The tasks of native attention cover every row and split once; long contexts are cut where threads would idle."""

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from kernels.paged_attention.native import AttentionBatch, AttentionShape, PageShape
from tests.kernels.conftest import Probe

SPLIT_TOKENS = 512
NUM_KV_HEADS = 3
SHAPE = AttentionShape(PageShape(1, NUM_KV_HEADS, 16, 64), 9)


@dataclass(frozen=True, slots=True)
class Task:
    """One of a plan's."""

    first_row: int
    num_tokens: int
    position: int
    kv_head: int
    first_split: int
    last_split: int
    has_partial: int

    @property
    def work(self) -> int:
        """Return products of a row with a token, when all rows see all of the tile's context."""
        begin = self.first_split * SPLIT_TOKENS
        return self.num_tokens * (min(self.last_split * SPLIT_TOKENS, self.position + self.num_tokens) - begin)


@pytest.fixture(scope="module")
def functions(probe: Probe) -> ctypes.CDLL:
    functions = probe("attention_plan", "paged_attention/plan.cpp")
    functions.tasks_of.restype = ctypes.c_int64
    return functions


def plan(
    functions: ctypes.CDLL, lengths: Sequence[int], contexts: Sequence[int], num_threads: int
) -> tuple[list[Task], int]:
    """Return the tasks and the number of combines."""
    query_lengths, context_lengths = torch.tensor(lengths), torch.tensor(contexts)
    tables, rows = torch.zeros(len(lengths), 1, dtype=torch.int64), torch.zeros(1000, 7, dtype=torch.int64)
    batch = AttentionBatch(len(lengths), query_lengths.data_ptr(), context_lengths.data_ptr(), tables.data_ptr(), 1)
    num_combines = ctypes.c_int64()
    count = functions.tasks_of(
        ctypes.byref(SHAPE),
        ctypes.byref(batch),
        num_threads,
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(len(rows)),
        ctypes.byref(num_combines),
    )
    return [Task(*row) for row in rows[:count].tolist()], num_combines.value


@pytest.mark.parametrize("num_threads", [1, 2, 64])
@pytest.mark.parametrize(
    ("lengths", "contexts"),
    [([1], [1]), ([1, 0, 300], [5000, 7, 1100]), ([256], [256]), ([1] * 5, [512, 513, 1024, 1025, 9]), ([0], [0])],
)
def test_every_row_and_split_is_in_one_task(
    functions: ctypes.CDLL, lengths: list[int], contexts: list[int], num_threads: int
) -> None:
    tasks, _ = plan(functions, lengths, contexts, num_threads)
    seen: Counter[tuple[int, int, int]] = Counter()
    positions = [context - length + i for length, context in zip(lengths, contexts, strict=True) for i in range(length)]
    for task in tasks:
        for token in range(task.num_tokens):
            assert positions[task.first_row + token] == task.position + token
            for split in range(task.first_split, task.last_split):
                seen[task.first_row + token, task.kv_head, split] += 1
    assert set(seen.values()) <= {1}
    for row, position in enumerate(positions):
        for head in range(NUM_KV_HEADS):
            assert all((row, head, split) in seen for split in range(position // SPLIT_TOKENS + 1))


def test_one_thread_cuts_nothing(functions: ctypes.CDLL) -> None:
    tasks, num_combines = plan(functions, [1], [5000], 1)
    assert len(tasks) == NUM_KV_HEADS
    assert num_combines == 0
    assert not any(task.has_partial for task in tasks)


def test_a_lone_long_context_is_cut_for_two_threads(functions: ctypes.CDLL) -> None:
    tasks, num_combines = plan(functions, [1], [5000], 2)
    assert len(tasks) == NUM_KV_HEADS * 10
    assert num_combines == NUM_KV_HEADS
    assert all(task.has_partial and task.last_split == task.first_split + 1 for task in tasks)


def test_many_long_contexts_are_not_cut(functions: ctypes.CDLL) -> None:
    tasks, num_combines = plan(functions, [1] * 8, [5000] * 8, 2)
    assert len(tasks) == 8 * NUM_KV_HEADS
    assert num_combines == 0


def test_the_longest_tasks_come_first(functions: ctypes.CDLL) -> None:
    tasks, _ = plan(functions, [1, 256, 1, 1], [9, 1024, 300, 70], 2)
    works = [task.work for task in tasks if task.num_tokens == 1]
    assert works == sorted(works, reverse=True)
    assert tasks[0].num_tokens > 1
    assert tasks[-1].work == 9
