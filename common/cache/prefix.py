"""Which full blocks of a pool hold the keys and values of which prefix. The engine thread owns it, like the pool.

A prefix is named by a chain of SHA-256 over (parent hash, token ids), rooted in the cache salt and the model's
fingerprint (`common.messages.prefixes`). The hash only finds a candidate: a hit also compares the token ids and the
salt of the whole prefix, so a collision is a miss, never another prefix's keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.cache.journal import PrefixJournal
from common.cache.pool import BlockPool, named
from common.messages.codec import pack_ids
from common.messages.ids import BlockId
from common.messages.prefixes import HashFunction, blocks_per_grain, extend, root_of, sha256, short_name


@dataclass(frozen=True, slots=True, eq=False)
class PrefixNode:
    """A prefix that ends with a full block: that block's token ids and the prefix before it."""

    digest: bytes
    parent: "PrefixNode | None"
    token_ids: tuple[int, ...]
    salt: str

    def is_same_prefix(self, other: "PrefixNode") -> bool:
        """Whether both stand for the same tokens under the same salt. O(1) where their parents are one object."""
        left: PrefixNode | None = self
        right: PrefixNode | None = other
        while left is not right:
            if left is None or right is None or left.token_ids != right.token_ids or left.salt != right.salt:
                return False
            left, right = left.parent, right.parent
        return True


class HashChain:
    """The hashed full blocks of one growing list of token ids, so that each block is hashed once.

    Belongs to one sequence; only a `PrefixCache` reads or writes it.
    """

    __slots__ = ("nodes", "num_published", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.nodes: list[PrefixNode] = []
        self.num_published = 0
        """Leading blocks that need no look at the cache any more, for the block ids that the sequence has now."""


@dataclass(frozen=True, slots=True)
class _Entry:
    node: PrefixNode
    block: BlockId


class PrefixCache:
    """Finds and registers full blocks by content. `fingerprint` is the model's: other models never hit.

    `hash_function` is an argument for tests; nothing but speed may depend on how good it is. `journal` is told what
    comes and goes, for other processes.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        fingerprint: str,
        hash_function: HashFunction = sha256,
        journal: PrefixJournal | None = None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._hash = hash_function
        self._journal = journal
        self._num_told = blocks_per_grain(block_size)
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[BlockId, bytes] = {}

    def match(self, token_ids: Sequence[int], chain: HashChain, max_tokens: int) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of at most `max_tokens`, each shared for the caller.

        Starts a new life of `chain`: what is published next belongs behind the blocks returned here.
        """
        found: list[BlockId] = []
        for index in range(min(max_tokens, len(token_ids)) // self._block_size):
            node = self._node(token_ids, chain, index)
            entry = self._entries.get(node.digest)
            if entry is None or not entry.node.is_same_prefix(node):
                break
            chain.nodes[index] = entry.node  # one object for one prefix keeps later comparisons short
            found.append(entry.block)
        chain.num_published = len(found)
        self._pool.share(found)
        return found

    def branch(self, chain: HashChain, source: HashChain, block_ids: Sequence[BlockId]) -> None:
        """Share leading blocks with the sequence of `source`, which owns them and begins with the same full blocks.

        Starts a new life of `chain` behind them, cached or not.
        """
        chain.nodes = source.nodes[: len(block_ids)]
        chain.num_published = len(block_ids)
        self._pool.share(block_ids)

    def publish(
        self, token_ids: Sequence[int], chain: HashChain, block_ids: Sequence[BlockId], num_computed: int
    ) -> None:
        """Register the full blocks among the first `num_computed` tokens, whose content must be complete.

        Idempotent. Where an equal block is cached already, or another prefix has that hash, a block stays private.
        """
        for index in range(chain.num_published, num_computed // self._block_size):
            node = self._node(token_ids, chain, index)
            if node.digest not in self._entries:
                block = block_ids[index]
                self._entries[node.digest] = _Entry(node, block)
                self._digests[block] = node.digest
                self._pool.keep(block, self._drop)
                if self._journal is not None and (index + 1) % self._num_told == 0:
                    self._journal.note(short_name(node.digest), is_there=True)
            chain.num_published = index + 1

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """Never hit these blocks again; the tail goes first. Those that are not cached are left alone."""
        for block in reversed(block_ids):
            if block in self._digests:
                self._drop(block)
                self._pool.discard(block)

    def violations(self) -> list[str]:
        """Return where the cache and its pool disagree, one text each. O(cached blocks)."""
        texts = []
        digests, kept = self._digests.keys(), self._pool.kept
        if digests != kept:
            texts.append(
                f"blocks {named(digests ^ kept)} are kept by the pool or known to the prefix cache, but not both"
            )
        named_blocks = {entry.block: digest for digest, entry in self._entries.items()}
        if named_blocks != self._digests:
            wrong = {block for block, _ in named_blocks.items() ^ self._digests.items()}
            texts.append(f"blocks {named(wrong)} stand for prefixes that do not name them")
        return texts

    def _drop(self, block: BlockId) -> None:
        digest = self._digests.pop(block)
        del self._entries[digest]
        if self._journal is not None:
            self._journal.note(short_name(digest), is_there=False)

    def _node(self, token_ids: Sequence[int], chain: HashChain, index: int) -> PrefixNode:
        nodes = chain.nodes
        while len(nodes) <= index:
            start = len(nodes) * self._block_size
            ids = tuple(token_ids[start : start + self._block_size])
            parent = nodes[-1] if nodes else None
            root = parent.digest if parent else root_of(self._fingerprint, chain.salt, self._hash)
            digest = extend(root, pack_ids(ids), self._hash)
            nodes.append(PrefixNode(digest, parent, ids, chain.salt))
        return nodes[index]
