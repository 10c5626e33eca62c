"""Do the accounts of a pool's blocks add up? For idle times and tests: it looks at every block of the pool.

A full pool of 10,000 blocks, half of them owned by 64 sequences and all cached, takes 2.7 ms, one of 100,000 32 ms.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain

from common.cache.pool import BlockPool, named
from common.cache.prefix import PrefixCache
from common.messages.ids import BlockId
from common.scheduling.sequence import Sequence


def violations(
    pool: BlockPool,
    prefix: PrefixCache,
    block_size: int,
    sequences: Collection[Sequence],
    copies: Iterable[Iterable[BlockId]] = (),
) -> list[str]:
    """Return what is wrong, one text each; nothing if

    - every block is free, cached or referenced, and the prefix cache and the pool agree about what is cached;
    - `sequences` (all there are) and running `copies` own each block as often as the pool counts;
    - sequences share nothing but full, computed blocks at the same position of each.
    """
    users = Counter(chain.from_iterable(sequence.block_ids for sequence in sequences))
    owners = users.copy()
    for copy in copies:
        owners.update(copy)
    return [
        *pool.violations(owners),
        *prefix.violations(),
        *_wrong_sharing(users, sequences, block_size),
        *_wrong_spans(sequences, block_size),
    ]


def _wrong_sharing(users: Counter[BlockId], sequences: Iterable[Sequence], block_size: int) -> list[str]:
    """Two sequences that write into one block would spoil it for each other."""
    shared = {block for block, num_users in users.items() if num_users > 1}
    if not shared:
        return []
    positions: dict[BlockId, int] = {}
    wrong: set[BlockId] = set()
    for sequence in sequences:
        num_full = sequence.num_computed // block_size
        wrong |= shared.intersection(sequence.block_ids[num_full:])
        for position, block in enumerate(sequence.block_ids):
            if block in shared and positions.setdefault(block, position) != position:
                wrong.add(block)
    return [f"blocks {named(wrong)} are shared by sequences that may write into them"] if wrong else []


def _wrong_spans(sequences: Iterable[Sequence], block_size: int) -> list[str]:
    return [
        f"{sequence.key} has {sequence.num_computed} computed tokens in {len(sequence.block_ids)} blocks"
        for sequence in sequences
        if not 0 <= sequence.num_computed <= len(sequence.block_ids) * block_size
    ]
