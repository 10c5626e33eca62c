"""What paged attention computes once per step, because it is equal for all layers: gather rows, masks, buckets.

Decoding sequences (one query token) are gathered and multiplied in buckets of similar context, prompt chunks one by
one. Rows are counted in one layer's half pages of one head, `block_size * head_dim` numbers each, from layer 0's first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MAX_PADDING_BLOCKS = 24
"""A bucket is cut before its padding exceeds this. Another bucket costs 60 us per layer on one core of an AVX-512
server CPU, a padded block of the 135M model 2.5 us."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences whose query tokens are rows [first, last), padded to one number of tokens.

    `rows` [2 * n * num_kv_heads * num_blocks] orders keys before values, then by sequence, head and block; `gathered`
    is the buffer for them, reused by every layer. `stale` lists the gathered tokens that must be cleared because their
    slots were never written. `mask` [n * num_kv_heads, 1, num_tokens] is 0 within the context and -inf beyond.
    """

    first: int
    last: int
    rows: torch.Tensor
    gathered: torch.Tensor
    stale: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Several query tokens of one sequence: rows [first, last). `mask` [length, context] is None if all is causal."""

    first: int
    last: int
    context: int
    rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of one step; `num_tokens` query tokens."""

    num_tokens: int
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[PromptChunk, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """One sequence of the batch: its query rows, context and blocks."""

    first: int
    length: int
    context: int
    table: torch.Tensor

    def num_blocks(self, block_size: int) -> int:
        return -(-self.context // block_size)


def plan_attention(
    pages: torch.Tensor, query_lengths: Sequence[int], context_lengths: Sequence[int], block_tables: torch.Tensor
) -> AttentionPlan:
    """Prepare a step over `pages` [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.

    The chunk of sequence i is its last `query_lengths[i]` (at least 1) tokens of `context_lengths[i]`; `block_tables`
    [num_seqs, max_blocks] int64 names its blocks, entries beyond the context are ignored. Any order is right; fewest
    buckets come from decoding sequences side by side, longest context first.
    """
    assert pages.is_contiguous()
    assert block_tables.dtype == torch.int64, block_tables.dtype
    assert len(query_lengths) == len(context_lengths) == len(block_tables)
    spans = list(_spans(query_lengths, context_lengths, block_tables))
    return AttentionPlan(
        num_tokens=sum(query_lengths),
        buckets=tuple(_bucket(pages, bucket) for bucket in _buckets(spans, pages.shape[4])),
        chunks=tuple(_chunk(pages, span) for span in spans if span.length > 1),
    )


def _spans(query_lengths: Sequence[int], context_lengths: Sequence[int], block_tables: torch.Tensor) -> Iterator[_Span]:
    first = 0
    for length, context, table in zip(query_lengths, context_lengths, block_tables, strict=True):
        assert 0 < length <= context, (length, context)
        yield _Span(first, length, context, table)
        first += length


def _buckets(spans: Sequence[_Span], block_size: int) -> Iterator[list[_Span]]:
    """Cut the decoding spans into runs of adjacent rows with little padding."""
    bucket: list[_Span] = []
    widest = total = 0
    for span in spans:
        if span.length > 1:
            continue
        blocks = span.num_blocks(block_size)
        padding = max(widest, blocks) * (len(bucket) + 1) - total - blocks
        if bucket and (span.first != bucket[-1].first + 1 or padding > MAX_PADDING_BLOCKS):
            yield bucket
            bucket, widest, total = [], 0, 0
        bucket.append(span)
        widest, total = max(widest, blocks), total + blocks
    if bucket:
        yield bucket


def _bucket(pages: torch.Tensor, spans: Sequence[_Span]) -> DecodeBucket:
    num_kv_heads, block_size, head_dim = pages.shape[3:]
    num_blocks = max(span.num_blocks(block_size) for span in spans)
    contexts = torch.tensor([span.context for span in spans]).unsqueeze(1)  # [n, 1]
    column = torch.arange(num_blocks)
    # Padding repeats the first block: a valid index, and where it is full, numbers that are known to be finite.
    source = torch.where(column * block_size < contexts, column, 0)  # [n, num_blocks]
    blocks = torch.stack([span.table[:num_blocks] for span in spans]).gather(1, source)
    rows = _page_rows(pages, blocks)
    dtype, device = pages.dtype, pages.device
    is_beyond = torch.arange(num_blocks * block_size) >= contexts  # [n, num_tokens]
    mask = torch.zeros(is_beyond.shape, dtype=dtype).masked_fill_(is_beyond, -torch.inf)
    return DecodeBucket(
        first=spans[0].first,
        last=spans[-1].first + 1,
        rows=rows.to(device),
        gathered=torch.empty(len(rows), block_size * head_dim, dtype=dtype, device=device),
        stale=_stale_tokens(source, contexts, num_kv_heads, block_size).to(device),
        mask=mask.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1).to(device),
    )


def _stale_tokens(source: torch.Tensor, contexts: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Return the gathered tokens [2, n, num_kv_heads, num_tokens] (flat indices) that come from unwritten slots."""
    num_sequences, num_blocks = source.shape
    position = (source * block_size).unsqueeze(-1) + torch.arange(block_size)  # [n, num_blocks, block_size]
    sequence, token = (position.view(num_sequences, -1) >= contexts).nonzero(as_tuple=True)
    num_tokens = num_blocks * block_size
    heads = torch.arange(2).unsqueeze(1) * (num_sequences * num_kv_heads) + torch.arange(num_kv_heads)
    first = sequence * (num_kv_heads * num_tokens) + token
    return (first.unsqueeze(1) + heads.view(-1) * num_tokens).view(-1)


def _chunk(pages: torch.Tensor, span: _Span) -> PromptChunk:
    table = span.table[: span.num_blocks(pages.shape[4])]
    start = span.context - span.length
    mask = None
    if start:
        mask = torch.full((span.length, span.context), -torch.inf, dtype=pages.dtype, device=pages.device)
        mask = mask.triu_(start + 1)
    return PromptChunk(
        first=span.first,
        last=span.first + span.length,
        context=span.context,
        rows=_page_rows(pages, table.unsqueeze(0)).to(pages.device),
        mask=mask,
    )


def _page_rows(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the rows [2 * n * num_kv_heads * num_blocks] that hold `blocks` [n, num_blocks], keys first."""
    _, num_layers, _, num_kv_heads, _, _ = pages.shape
    first = (blocks * (num_layers * 2 * num_kv_heads)).unsqueeze(1)  # [n, 1, num_blocks]
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)
    return (first + heads).view(-1)
