"""What stands in the pages of a pool, as tags: each slot names the whole prefix whose keys and values it holds.

A slot also remembers the generation that it was written under, so that these are noticed: reading a block that was
given away, reading another prefix, reading what was never written, and changing what a valid reference still names.
"""

from collections.abc import Sequence
from itertools import accumulate

from common.cache.pool import BlockPool
from common.cache.prefix import HashChain, PrefixCache
from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import BlockId

Tag = tuple[str, int]
"""Salt and chain of all tokens up to this one."""


def tags(token_ids: Sequence[int], salt: str) -> list[Tag]:
    """Return the tag of every position."""
    return [(salt, chain) for chain in accumulate(token_ids, extend_chain, initial=EMPTY_CHAIN)][1:]


class PagedContent:
    """The memory behind one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._slots: dict[tuple[BlockId, int], tuple[int, Tag]] = {}
        self._copied: set[tuple[BlockId, int]] = set()
        """Slots that hold what was copied into them: their owner may write over it."""

    def write(self, token_ids: Sequence[int], salt: str, block_ids: Sequence[BlockId], span: range) -> None:
        """Write the positions of `span` of that sequence."""
        known = tags(token_ids, salt)
        for position in span:
            slot = self._slot(block_ids, position)
            generation = self._pool.generation(slot[0])
            written = self._slots.get(slot)
            is_changed = written is not None and written[0] == generation and written[1] != known[position]
            assert not is_changed or slot in self._copied, (
                f"content of block {slot[0]} changes under generation {generation}"
            )
            self._slots[slot] = (generation, known[position])
            self._copied.discard(slot)

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Copy a whole block. What was in the target before must be nobody's."""
        generation = self._pool.generation(target)
        for offset in range(self._block_size):
            slot = (target, offset)
            written = self._slots.pop(slot, None)
            assert written is None or written[0] != generation, f"a copy overwrites block {target}"
            original = self._slots.get((source, offset))
            if original is not None:
                self._slots[slot] = (generation, original[1])
                self._copied.add(slot)

    def verify(self, token_ids: Sequence[int], salt: str, block_ids: Sequence[BlockId], span: range) -> None:
        """Fail unless every position of `span` holds exactly this sequence's own prefix."""
        known = tags(token_ids, salt)
        for position in span:
            slot = self._slot(block_ids, position)
            assert slot in self._slots, f"position {position} was never written"
            generation, tag = self._slots[slot]
            assert generation == self._pool.generation(slot[0]), f"block {slot[0]} was given away"
            assert tag == known[position], f"position {position} holds another prefix"

    def verify_hits(self, prefix: PrefixCache, token_ids: Sequence[int], salt: str) -> None:
        """Fail unless whatever a newcomer with these tokens would hit is complete and right."""
        hit = prefix.match(token_ids, HashChain(salt), len(token_ids))
        self.verify(token_ids, salt, hit, range(len(hit) * self._block_size))
        self._pool.release(hit)

    def blocks(self, block_ids: Sequence[BlockId], span: range) -> frozenset[BlockId]:
        """Return the blocks that hold the positions of `span`."""
        return frozenset(self._slot(block_ids, position)[0] for position in span)

    def _slot(self, block_ids: Sequence[BlockId], position: int) -> tuple[BlockId, int]:
        return block_ids[position // self._block_size], position % self._block_size
