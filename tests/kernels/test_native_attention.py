"""Native paged attention equals its reference, bit for bit the same however a context comes to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from kernels.native.library import Library
from kernels.paged_attention import reference
from kernels.paged_attention.native import paged_attention
from tests.support.tolerances import close

DTYPES = [torch.float32, torch.bfloat16]
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences in pages: NaN wherever no token of theirs is."""

    contexts: tuple[int, ...]
    pages: torch.Tensor
    tables: torch.Tensor
    queries: tuple[torch.Tensor, ...]  # of every token of each sequence

    def attend(self, library: Library, lengths: Sequence[int], num_threads: int = 1) -> torch.Tensor:
        """Return [num_tokens, num_heads * head_dim] for the last `lengths` tokens of the sequences."""
        query = self._chunk(lengths)
        return paged_attention(
            library, query, self.pages, LAYER, lengths, self.contexts, self.tables, num_threads=num_threads
        )

    def expected(self, lengths: Sequence[int]) -> torch.Tensor:
        """Return what the reference says."""
        query = self._chunk(lengths)
        return reference.paged_attention(query, self.pages[:, LAYER], lengths, self.contexts, self.tables).flatten(1)

    def cut(self, sequence: int, context: int) -> "Case":
        """Return one of the sequences when it had no more than `context` tokens; later ones are unwritten."""
        pages, table, block_size = self.pages.clone(), self.tables[sequence], self.pages.shape[4]
        for position in range(context, self.contexts[sequence]):
            pages[int(table[position // block_size]), :, :, :, position % block_size] = torch.nan
        num_blocks = -(-context // block_size)
        table = torch.cat((table[:num_blocks], torch.tensor([-1]))).unsqueeze(0)
        return Case((context,), pages, table, (self.queries[sequence][:context],))

    def _chunk(self, lengths: Sequence[int]) -> torch.Tensor:
        parts = [query[len(query) - length :] for query, length in zip(self.queries, lengths, strict=True)]
        # The queries are a slice of wider rows, as in a model.
        return functional.pad(torch.cat(parts), (0, 0, 0, 1), value=torch.nan)[:, :-1]


def make_case(
    contexts: Sequence[int],
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    torch.manual_seed(sum(contexts))
    num_heads, num_kv_heads = heads
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks).tolist()
    pages = torch.full((num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(contexts), max(counts) + 1), -1, dtype=torch.int64)
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        tokens = torch.randn(count, block_size, NUM_LAYERS, 2, num_kv_heads, head_dim)
        tokens.view(count * block_size, -1)[context:] = torch.nan
        pages[blocks] = tokens.permute(0, 2, 3, 4, 1, 5).to(dtype)
    queries = tuple(torch.randn(context, num_heads, head_dim).to(dtype) for context in contexts)
    return Case(tuple(contexts), pages, tables, queries)


def check(library: Library, case: Case, lengths: Sequence[int]) -> None:
    output = case.attend(library, lengths)
    close(output, case.expected(lengths))
    assert torch.equal(case.attend(library, lengths, num_threads=2), output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts", [[1], [63, 64, 65], [40, 16, 1, 33, 32], [511], [512], [513], [1100, 7]])
def test_decode(library: Library, contexts: list[int], dtype: torch.dtype) -> None:
    check(library, make_case(contexts, dtype=dtype), [1] * len(contexts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "context"), [(2, 2), (65, 65), (7, 30), (33, 300), (64, 65), (2, 513), (40, 530), (1, 1025), (3, 1100)]
)
def test_chunk(library: Library, length: int, context: int, dtype: torch.dtype) -> None:
    check(library, make_case([context], dtype=dtype), [length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 1024])
def test_block_sizes(library: Library, block_size: int, dtype: torch.dtype) -> None:
    check(library, make_case([21, 69, 130, 64], block_size=block_size, dtype=dtype), [1, 5, 1, 9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 10, 34, 80, 96, 128, 130, 256])
def test_head_dims(library: Library, head_dim: int, dtype: torch.dtype) -> None:
    check(library, make_case([19, 4, 70], (4, 2), head_dim, dtype=dtype), [1, 1, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (14, 2), (100, 1)])
def test_groups(library: Library, heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(library, make_case([19, 4, 70], heads, 16, dtype=dtype), [1, 1, 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_bitwise_the_same_however_it_is_computed(library: Library, dtype: torch.dtype) -> None:
    case = make_case([600, 130, 9], dtype=dtype)
    whole = case.attend(library, [600, 130, 9])
    assert torch.equal(case.attend(library, [600, 130, 9], num_threads=2), whole)
    for sequence, first_row in enumerate((0, 600, 730)):
        for start, end in [(0, 1), (0, 9), (8, 9), (63, 64), (60, 70), (100, 130), (64, 65), (300, 520), (511, 600)]:
            if end > case.contexts[sequence]:
                continue
            part = case.cut(sequence, end)
            for num_threads in (1, 2):
                chunk = part.attend(library, [end - start], num_threads)
                assert torch.equal(chunk, whole[first_row + start : first_row + end]), (sequence, start, end)


def test_sequences_without_a_query_are_passed_over(library: Library) -> None:
    case = make_case([5, 30, 70])
    rows = case.attend(library, [1, 0, 2])
    close(rows, case.expected([1, 0, 2]))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_empty_batch(library: Library, num_threads: int) -> None:
    pages, tables = torch.zeros(2, NUM_LAYERS, 2, 3, 16, 64), torch.zeros(0, 1, dtype=torch.int64)
    query = torch.zeros(0, 9, 64)
    result = paged_attention(library, query, pages, LAYER, [], [], tables, num_threads=num_threads)
    assert result.shape == (0, 9 * 64)


def test_a_neighbours_nan_stays_with_it(library: Library) -> None:
    case = make_case([33, 33])
    case.pages[int(case.tables[1, 0]), :, :, :, 4] = torch.nan
    output = case.attend(library, [1, 1])
    assert output[0].isfinite().all()
    assert output[1].isnan().all()


def test_great_scores_do_not_overflow(library: Library) -> None:
    case = make_case([70])
    case.queries[0].mul_(1e4)
    close(case.attend(library, [70]), case.expected([70]))


@pytest.mark.parametrize("block", [-1, 100])
def test_a_block_outside_of_the_pages_is_refused(library: Library, block: int) -> None:
    case = make_case([33])
    case.tables[0, 1] = block
    with pytest.raises(AssertionError):
        case.attend(library, [1])
