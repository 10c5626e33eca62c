"""The blocks of one KV pool and who owns them. The engine thread of a worker owns the pool; nobody else touches it.

A block has owners: sequences, and running copies or receivers. It is in exactly one of three states:

    referenced   at least one owner
    cached       no owner, but the prefix cache still knows its content; may be taken, least recently released first
    free         no owner, no content worth keeping

The generation of a block changes whenever its content stops being what a reference was made for: before it becomes
free, and before a cached block is taken for something else. While a block is cached its generation stays, because its
content is still what the references say.
"""

from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from typing import Protocol

from common.messages.ids import BlockId, Generation

Evicted = Callable[[BlockId], None]
"""Told that a kept block is about to be reused: its content is no longer there."""


NUM_NAMED = 8
"""Blocks that one text names at most."""


def named(blocks: Iterable[BlockId]) -> str:
    """Return the numbers of some of these blocks, for a text about all of them."""
    numbers = sorted(blocks)
    more = f" and {len(numbers) - NUM_NAMED} more" if len(numbers) > NUM_NAMED else ""
    return ", ".join(map(str, numbers[:NUM_NAMED])) + more


class Generations(Protocol):
    """One generation number per block: a list, or the table in shared memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def __setitem__(self, block: int, generation: int, /) -> None: ...


class BlockPool:
    """Ownership by reference counts over blocks `0 .. num_blocks - 1`.

    `generations` has one entry per block and belongs to the owner of the pages (it may lie in shared memory).
    """

    def __init__(self, num_blocks: int, generations: Generations) -> None:
        assert len(generations) == num_blocks
        self._generations = generations
        self._num_owners = [0] * num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._kept: dict[BlockId, Evicted] = {}
        self._unreferenced: dict[BlockId, None] = {}
        """Kept blocks without an owner, in order of release: the first is evicted first."""

    @property
    def num_total(self) -> int:
        """Blocks of the pool."""
        return len(self._num_owners)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, unreferenced cached ones included."""
        return len(self._free) + len(self._unreferenced)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that the prefix cache knows."""
        return len(self._unreferenced)

    @property
    def kept(self) -> KeysView[BlockId]:
        """Blocks whose content the prefix cache keeps, owned or not."""
        return self._kept.keys()

    @property
    def num_referenced(self) -> int:
        """Blocks with at least one owner."""
        return self.num_total - self.num_free

    def generation(self, block: BlockId) -> Generation:
        """Return the generation that a reference to the block's present content carries."""
        return Generation(self._generations[block])

    def num_owners(self, block: BlockId) -> int:
        """Return how many owners the block has."""
        return self._num_owners[block]

    def take(self, count: int) -> list[BlockId] | None:
        """Return `count` blocks with one owner each, or None (and nothing changes) if there are not so many."""
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._evict(next(iter(self._unreferenced)))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._num_owners[block] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one owner to each block; each has an owner already or is cached."""
        for block in block_ids:
            if not self._num_owners[block]:
                del self._unreferenced[block]
            self._num_owners[block] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Remove one owner from each block, the last block first, so that the tail of a prefix is evicted first."""
        for block in reversed(block_ids):
            assert self._num_owners[block] > 0, f"block {block} has no owner to release it"
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            if block in self._kept:
                self._unreferenced[block] = None
            else:
                self._free_up(block)

    def keep(self, block: BlockId, evicted: Evicted) -> None:
        """Keep the content of an owned block when its last owner lets go; `evicted` is called when it goes at last."""
        assert self._num_owners[block] > 0, f"block {block} has no owner, so no content to keep"
        assert block not in self._kept, f"block {block} is already kept"
        self._kept[block] = evicted

    def discard(self, block: BlockId) -> None:
        """Stop keeping the block's content: it becomes free at once, or when its last owner lets go."""
        del self._kept[block]
        if block in self._unreferenced:
            del self._unreferenced[block]
            self._free_up(block)

    def violations(self, owners: Mapping[BlockId, int] | None = None) -> list[str]:
        """Return what is wrong with the accounts, one text each. For idle times and tests: O(blocks).

        Every block must be in exactly one state. `owners`, if given, says how often each block is owned by somebody who
        is known (none: not named).
        """
        counts, free, cached = self._num_owners, set(self._free), self._unreferenced.keys()
        referenced = {BlockId(block) for block, count in enumerate(counts) if count}
        found = {
            "are free and cached": free & cached,
            "are free and referenced": free & referenced,
            "are cached without owner and referenced": cached & referenced,
            "are free and kept for the prefix cache": free & self._kept.keys(),
            "are cached but not kept": set() if cached <= self._kept.keys() else cached - self._kept.keys(),
        }
        if owners is not None and owners != {block: counts[block] for block in referenced}:
            found["have owners that nobody knows"] = {b for b in referenced if counts[b] > owners.get(b, 0)}
            found["are used by more than own them"] = {b for b, count in owners.items() if count > counts[b]}
        texts = [f"blocks {named(blocks)} {text}" for text, blocks in found.items() if blocks]
        if min(counts, default=0) < 0:
            texts.append("a block has fewer than no owners")
        if len(free) != len(self._free):
            texts.append(f"{len(self._free)} entries in the free list are {len(free)} blocks")
        if len(free) + len(cached) + len(referenced) != self.num_total:
            sizes = f"{len(free)} free + {len(cached)} cached + {len(referenced)} referenced"
            texts.append(f"{sizes} blocks are not {self.num_total}")
        return texts

    def check(self) -> None:
        """Raise `AssertionError` if there are `violations`."""
        found = self.violations()
        assert not found, "; ".join(found)

    def _evict(self, block: BlockId) -> None:
        evicted = self._kept[block]
        self.discard(block)
        evicted(block)

    def _free_up(self, block: BlockId) -> None:
        self._generations[block] += 1  # first: whoever takes the block next must already find the new one
        self._free.append(block)
