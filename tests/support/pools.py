"""Pools for transfer tests: small or realistic, with content that names the page and its generation."""

import secrets
from collections.abc import Iterable

from common.cache.layout import KVLayout
from common.messages.ids import BlockId, Epoch, Generation
from common.transfer.pool_memory import PoolMemory
from common.transfer.protocols import PageCopy

SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
"""Pages of 8 KiB."""

LARGE = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
"""Pages of 368 640 bytes: those of the bundled model."""


def make_pool(layout: KVLayout = SMALL, num_blocks: int = 16) -> PoolMemory:
    """Return an empty pool of a new epoch."""
    return PoolMemory.create(layout, num_blocks, Epoch(secrets.randbits(63)))


def content(block: int, generation: int, num_bytes: int) -> bytes:
    """Return the bytes that `fill` writes: an 8-byte stamp, repeated."""
    return ((block << 40) + generation).to_bytes(8, "little") * (num_bytes // 8)


def fill(pool: PoolMemory, blocks: Iterable[int], generation: int) -> None:
    """Reuse the blocks: change the generation, then the content."""
    for block in blocks:
        pool.generations[block] = generation
        pool.page(BlockId(block))[:] = content(block, generation, pool.header.page_bytes)


def copies(pairs: Iterable[tuple[int, int]], generation: int) -> list[PageCopy]:
    """Return copies of (source, target) pairs that share a generation."""
    return [PageCopy(BlockId(source), Generation(generation), BlockId(target)) for source, target in pairs]


def is_copied(pool: PoolMemory, target: int, source: int, generation: int) -> bool:
    """Whether the target page holds what `fill` wrote into the source page."""
    return bytes(pool.page(BlockId(target))) == content(source, generation, pool.header.page_bytes)
