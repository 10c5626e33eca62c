"""The audit of blocks: right accounts pass, every planted error is told."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.ids import BlockId
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.sequence import Sequence
from tests.support.sequences import sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 16


@dataclass
class Accounts:
    """A pool with two sequences that share two blocks of a prefix, a cached prefix, and a running copy."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS))
    sequences: list[Sequence] = field(default_factory=list)
    copies: list[list[BlockId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "f")
        self.blocks = SequenceBlocks(self.pool, self.prefix, BLOCK_SIZE)
        for name, tail in (("a", [50, 51]), ("b", [60] * 6)):
            one = sequence(name, [*range(8), *tail])
            assert self.blocks.acquire(one)
            self.blocks.advance(one, 8 - one.num_computed)
            self.sequences.append(one)
        gone = sequence("gone", [70] * 8)
        assert self.blocks.acquire(gone)
        self.blocks.advance(gone, 8)
        self.blocks.release(gone)
        copied = self.sequences[1].block_ids[2:]
        self.pool.share(copied)
        self.copies.append(copied)

    @property
    def texts(self) -> list[str]:
        return self.blocks.violations(self.sequences, self.copies)


@pytest.fixture
def accounts() -> Accounts:
    accounts = Accounts()
    assert accounts.sequences[0].block_ids[:2] == accounts.sequences[1].block_ids[:2]
    assert accounts.pool.num_cached == 2
    return accounts


def test_right_accounts(accounts: Accounts) -> None:
    assert accounts.texts == []
    accounts.pool.release(accounts.copies.pop())
    for one in accounts.sequences:
        accounts.blocks.release(one)
    assert accounts.texts == []
    accounts.sequences.clear()
    assert accounts.texts == []
    assert accounts.pool.num_free == NUM_BLOCKS


def leak(accounts: Accounts) -> None:
    accounts.pool.take(1)


def forget_a_sequence(accounts: Accounts) -> None:
    accounts.sequences.pop()


def forget_a_copy(accounts: Accounts) -> None:
    accounts.copies.clear()


def release_twice(accounts: Accounts) -> None:
    accounts.pool.release(accounts.sequences[0].block_ids[:1])


def release_twice_and_give_it_to_another(accounts: Accounts) -> None:
    tail = accounts.sequences[0].block_ids[2:]
    accounts.pool.release(tail)
    other = sequence("other", [80, 81])
    assert accounts.blocks.acquire(other)
    accounts.sequences.append(other)
    assert other.block_ids == tail


def share_a_block_that_is_not_full(accounts: Accounts) -> None:
    first, second = accounts.sequences
    accounts.pool.release(second.block_ids[2:3])
    accounts.copies[0] = accounts.copies[0][1:]
    accounts.pool.release([second.block_ids[2]])
    accounts.pool.share(first.block_ids[2:3])
    second.block_ids[2] = first.block_ids[2]


def share_at_another_position(accounts: Accounts) -> None:
    block_ids = accounts.sequences[1].block_ids
    block_ids[0], block_ids[1] = block_ids[1], block_ids[0]


def compute_beyond_the_blocks(accounts: Accounts) -> None:
    accounts.sequences[0].num_computed = 99


def keep_for_nobody(accounts: Accounts) -> None:
    accounts.pool.keep(accounts.sequences[0].block_ids[2], lambda block: None)


def lose_a_prefix(accounts: Accounts) -> None:
    accounts.prefix._drop(accounts.sequences[0].block_ids[0])


def name_another_block(accounts: Accounts) -> None:
    digests = accounts.prefix._digests
    first, second = list(digests)[:2]
    digests[first], digests[second] = digests[second], digests[first]


def count_a_free_block_twice(accounts: Accounts) -> None:
    accounts.pool._free.append(accounts.pool._free[0])


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (leak, "have owners that nobody knows"),
        (forget_a_sequence, "have owners that nobody knows"),
        (forget_a_copy, "have owners that nobody knows"),
        (release_twice, "are used by more than own them"),
        (release_twice_and_give_it_to_another, "are shared by sequences that may write into them"),
        (share_a_block_that_is_not_full, "are shared by sequences that may write into them"),
        (share_at_another_position, "are shared by sequences that may write into them"),
        (compute_beyond_the_blocks, "has 99 computed tokens in 3 blocks"),
        (keep_for_nobody, "kept by the pool or known to the prefix cache, but not both"),
        (lose_a_prefix, "kept by the pool or known to the prefix cache, but not both"),
        (name_another_block, "stand for prefixes that do not name them"),
        (count_a_free_block_twice, "entries in the free list"),
    ],
)
def test_every_planted_error_is_told(accounts: Accounts, plant: Callable[[Accounts], None], text: str) -> None:
    plant(accounts)
    assert any(text in told for told in accounts.texts), accounts.texts


def test_many_blocks_are_told_shortly(accounts: Accounts) -> None:
    accounts.pool.take(9)
    (text,) = accounts.texts
    assert text.count(",") == 7
    assert "and 1 more" in text
