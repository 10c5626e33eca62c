"""Paged attention equals its reference for decoding, prompt chunks and mixtures, and never reads an unwritten slot."""

from collections.abc import Sequence

import pytest
import torch

from kernels.paged_attention import reference
from kernels.paged_attention.op import paged_attention
from kernels.paged_attention.plan import plan_attention
from tests.support.tolerances import close

NUM_LAYERS = 2
LAYER = 1


def scattered_tables(contexts: Sequence[int], block_size: int) -> tuple[torch.Tensor, int]:
    """Return block tables over shuffled blocks, padded with an invalid id, and the number of blocks."""
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(contexts), max(counts, default=1) + 1), -1, dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return tables, num_blocks


def poisoned_pages(
    contexts: Sequence[int], tables: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return pages of `shape` with random numbers in the contexts' slots of every layer, and NaN everywhere else."""
    pages = torch.full(shape, torch.nan, dtype=dtype)
    num_layers, num_kv_heads, block_size, head_dim = shape[1], shape[3], shape[4], shape[5]
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context):
            token = torch.randn(num_layers, 2, num_kv_heads, head_dim).to(dtype)
            pages[int(table[position // block_size]), :, :, :, position % block_size] = token
    return pages


def check(
    lengths: Sequence[int],
    contexts: Sequence[int],
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    torch.manual_seed(sum(contexts))
    num_heads, num_kv_heads = heads
    tables, num_blocks = scattered_tables(contexts, block_size)
    pages = poisoned_pages(contexts, tables, (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), dtype)
    # The query is a slice of wider rows, as in the model.
    query = torch.randn(sum(lengths), num_heads + 2, head_dim).to(dtype)[:, :num_heads]
    plan = plan_attention(pages, lengths, contexts, tables)
    expected = reference.paged_attention(query, pages[:, LAYER], lengths, contexts, tables)
    close(paged_attention(query, pages, LAYER, plan), expected.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "contexts", [[1], [15], [16], [17], [300], [1, 2, 3], [40, 16, 1, 33, 32], [200] * 3 + [9] * 5]
)
def test_decode(contexts: list[int], dtype: torch.dtype) -> None:
    check([1] * len(contexts), contexts, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "context"), [(2, 2), (5, 5), (33, 33), (7, 30), (2, 300), (64, 65), (16, 32)])
def test_chunk(length: int, context: int, dtype: torch.dtype) -> None:
    check([length], [context], dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 64])
def test_block_sizes(block_size: int) -> None:
    check([1, 5, 1, 9], [21, 5, 64, 40], block_size=block_size)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 8), ((8, 1), 16), ((6, 2), 10), ((1, 1), 128)])
def test_head_geometries(heads: tuple[int, int], head_dim: int) -> None:
    check([1, 1, 3], [19, 4, 20], heads=heads, head_dim=head_dim)


def test_mixture_in_any_order() -> None:
    check([1, 4, 1, 1, 6, 2, 1], [3, 4, 50, 17, 30, 2, 1])


def test_empty_batch() -> None:
    pages = torch.zeros(2, NUM_LAYERS, 2, 3, 16, 64)
    plan = plan_attention(pages, [], [], torch.zeros(0, 1, dtype=torch.int64))
    assert paged_attention(torch.zeros(0, 9, 64), pages, LAYER, plan).shape == (0, 9 * 64)


def test_short_contexts_do_not_pay_for_long_ones() -> None:
    contexts = [1600, 1590, *[20] * 30]
    tables, num_blocks = scattered_tables(contexts, 16)
    pages = torch.zeros(num_blocks, 1, 2, 1, 16, 8)
    buckets = plan_attention(pages, [1] * 32, contexts, tables.clamp(min=0)).buckets
    assert [(bucket.first, bucket.last) for bucket in buckets] == [(0, 2), (2, 32)]


def test_similar_contexts_share_one_bucket() -> None:
    contexts = [160 + index % 16 for index in range(32)]
    tables, num_blocks = scattered_tables(contexts, 16)
    pages = torch.zeros(num_blocks, 1, 2, 1, 16, 8)
    assert len(plan_attention(pages, [1] * 32, contexts, tables.clamp(min=0)).buckets) == 1


def test_a_neighbours_nan_stays_with_it() -> None:
    torch.manual_seed(0)
    contexts = [33, 33]
    tables, num_blocks = scattered_tables(contexts, 16)
    pages = poisoned_pages(contexts, tables, (num_blocks, NUM_LAYERS, 2, 3, 16, 64), torch.float32)
    pages[int(tables[1, 0]), :, :, :, 4] = torch.nan
    output = paged_attention(torch.randn(2, 9, 64), pages, LAYER, plan_attention(pages, [1, 1], contexts, tables))
    assert output[0].isfinite().all()
    assert output[1].isnan().all()
