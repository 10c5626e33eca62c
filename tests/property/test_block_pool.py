"""Block pool and prefix cache against a model of what stands in the blocks and who owns them.

Kills these planted bugs (each was planted and found): a generation that stays when a block becomes free, or changes
when it becomes cached; publishing blocks that are not computed; a hit that does not compare the token ids, the salt or
the tokens before the block (weak hash); `match` that does not share; `share` that leaves the block evictable or loses
an owner; eviction or `forget` that leaves an entry behind; `take` that does not count cached blocks.

Kills the planted bugs GEN_LATE, evicted-but-known, evicted-under-its-generation, freed-with-the-first-owner,
hash-is-enough, hit-unpinned and published-too-far.
"""

import hashlib
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.ids import BlockId, Generation, PlacementNumber, RequestId
from common.messages.prefixes import HashFunction, sha256
from common.messages.sampling import SamplingParams
from common.scheduling.sequence import Sequence, SequenceKey
from tests.support.paged_content import PagedContent

BLOCK_SIZE = 2
NUM_BLOCKS = 6
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SALTS = st.sampled_from(["", "a"])


def _one_of_two(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:1].translate(bytes(byte % 2 for byte in range(256)))


class Copy:
    """A running copy of complete blocks: co-owns them, and checks them as a peer would."""

    def __init__(self, sequence: Sequence, pool: BlockPool) -> None:
        self.block_ids: list[BlockId] = sequence.block_ids[: sequence.num_computed // BLOCK_SIZE]
        self.token_ids = list(sequence.token_ids)
        self.salt = sequence.cache_salt
        self.generations: list[Generation] = [pool.generation(block) for block in self.block_ids]


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    copies = Bundle("copies")
    references = Bundle("references")

    @initialize(hash_function=st.sampled_from([sha256, _one_of_two]))
    def build(self, hash_function: HashFunction) -> None:
        self.generations = [0] * NUM_BLOCKS
        self.pool = BlockPool(NUM_BLOCKS, self.generations)
        self.prefix = PrefixCache(self.pool, BLOCK_SIZE, "fingerprint", hash_function)
        self.content = PagedContent(self.pool, BLOCK_SIZE)
        self.owners: list[list[BlockId]] = []
        self.num_started = 0

    @rule(target=sequences, token_ids=PROMPTS, salt=SALTS)
    def start(self, token_ids: list[int], salt: str) -> object:
        sequence = self._begin(token_ids, salt)
        return sequence if sequence.block_ids else multiple()

    @rule(token_ids=PROMPTS, salt=SALTS)
    def pass_through(self, token_ids: list[int], salt: str) -> None:
        """Start, compute and finish at once: fills the cache and evicts."""
        sequence = self._begin(token_ids, salt)
        if sequence.block_ids:
            self.compute(sequence, len(token_ids))
        self._let_go(sequence.block_ids)

    def _begin(self, token_ids: list[int], salt: str) -> Sequence:
        self.num_started += 1
        key = SequenceKey(RequestId(str(self.num_started)), PlacementNumber(1))
        sequence = Sequence(key, list(token_ids), len(token_ids), SamplingParams(1, 9), self.num_started, salt)
        self._acquire(sequence)
        return sequence

    def _acquire(self, sequence: Sequence) -> None:
        token_ids = sequence.token_ids
        cached = self.prefix.match(token_ids, sequence.hash_chain, len(token_ids) - 1)
        sequence.num_computed = len(cached) * BLOCK_SIZE
        assert sequence.num_computed < len(token_ids)
        self.content.verify(token_ids, sequence.cache_salt, cached, range(sequence.num_computed))
        num_missing = -(-len(token_ids) // BLOCK_SIZE) - len(cached)
        num_free = self.pool.num_free
        taken = self.pool.take(num_missing)
        assert (taken is None) == (num_missing > num_free)
        sequence.block_ids = cached + (taken or [])
        if taken is None:
            self.pool.release(cached)
            sequence.block_ids = []
            sequence.num_computed = 0
        self.owners.append(sequence.block_ids)

    @rule(sequence=sequences, length=st.integers(1, 4))
    def compute(self, sequence: Sequence, length: int) -> None:
        if not sequence.block_ids:
            return
        span = range(sequence.num_computed, min(sequence.num_computed + length, sequence.num_tokens))
        self.content.verify(sequence.token_ids, sequence.cache_salt, sequence.block_ids, range(sequence.num_computed))
        for block in self.content.blocks(sequence.block_ids, span):
            assert sum(block in owner for owner in self.owners) == 1, "writes into a shared block"
        self.content.write(sequence.token_ids, sequence.cache_salt, sequence.block_ids, span)
        sequence.num_computed = span.stop
        self.prefix.publish(sequence.token_ids, sequence.hash_chain, sequence.block_ids, sequence.num_computed)

    @rule(sequence=sequences, token=st.integers(0, 1))
    def append(self, sequence: Sequence, token: int) -> None:
        if sequence.block_ids and sequence.num_tokens % BLOCK_SIZE == 0:
            taken = self.pool.take(1)
            if taken is None:
                return
            sequence.block_ids += taken
        sequence.token_ids.append(token)

    @rule(sequence=sequences)
    def preempt(self, sequence: Sequence) -> None:
        """Start again; where there is no room, the sequence has no blocks until it is preempted once more."""
        self._let_go(sequence.block_ids)
        self._acquire(sequence)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self._let_go(sequence.block_ids)

    @rule(sequence=consumes(sequences))
    def fail(self, sequence: Sequence) -> None:
        self.prefix.forget(sequence.block_ids)
        again = self.prefix.match(sequence.token_ids, sequence.hash_chain, sequence.num_tokens)
        assert not set(again) & set(sequence.block_ids)
        self.pool.release(again)
        self._let_go(sequence.block_ids)

    @rule(target=copies, sequence=sequences)
    def begin_copy(self, sequence: Sequence) -> Copy:
        copy = Copy(sequence, self.pool)
        self.pool.share(copy.block_ids)
        self.owners.append(copy.block_ids)
        return copy

    @rule(copy=consumes(copies))
    def end_copy(self, copy: Copy) -> None:
        assert [self.pool.generation(block) for block in copy.block_ids] == copy.generations
        self._read(copy)
        self._let_go(copy.block_ids)

    @rule(target=references, sequence=sequences)
    def refer(self, sequence: Sequence) -> Copy:
        return Copy(sequence, self.pool)

    @rule(reference=references)
    def pull(self, reference: Copy) -> None:
        """What a peer pulls by an old reference is stale or the same as ever."""
        if [self.pool.generation(block) for block in reference.block_ids] == reference.generations:
            self._read(reference)

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.violations(Counter(block for owner in self.owners for block in owner)) == []
        assert self.prefix.violations() == []
        num_owned = len({block for owner in self.owners for block in owner})
        assert self.pool.num_referenced == num_owned
        assert self.pool.num_free == NUM_BLOCKS - num_owned
        assert self.pool.num_cached <= self.pool.num_free

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for owner in list(self.owners):
            self._let_go(owner)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_total
        taken = self.pool.take(NUM_BLOCKS)
        assert taken is not None
        assert sorted(taken) == list(range(NUM_BLOCKS))
        assert self.pool.num_cached == 0
        self.pool.release(taken)

    def _read(self, copy: Copy) -> None:
        span = range(len(copy.block_ids) * BLOCK_SIZE)
        self.content.verify(copy.token_ids, copy.salt, copy.block_ids, span)

    def _let_go(self, block_ids: list[BlockId]) -> None:
        position = next(index for index, owner in enumerate(self.owners) if owner is block_ids)
        del self.owners[position]
        self.pool.release(block_ids)


TestPool = PoolMachine.TestCase
