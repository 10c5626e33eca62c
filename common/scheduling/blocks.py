"""The blocks of sequences: found in the prefix cache, taken, published when full, released. Used by both schedulers."""

from collections.abc import Collection, Iterable

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.ids import BlockId
from common.scheduling.audit import violations
from common.scheduling.plan import BlockCopy
from common.scheduling.sequence import Sequence


class SequenceBlocks:
    """Moves blocks between one pool and the sequences of one scheduler."""

    def __init__(self, pool: BlockPool, prefix: PrefixCache, block_size: int) -> None:
        self._pool = pool
        self._prefix = prefix
        self._block_size = block_size
        self._refused: Sequence | None = None
        self._num_free_wanted = 0
        """With fewer free blocks than this, another look at the prefix cache for `_refused` is in vain."""

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self._pool.num_total * self._block_size

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence's present tokens need beyond those that it has."""
        return -(-len(sequence.token_ids) // self._block_size) - len(sequence.block_ids)

    def num_full(self, sequence: Sequence) -> int:
        """Return how many leading blocks of the sequence are full and computed."""
        return sequence.num_computed // self._block_size

    def acquire(self, sequence: Sequence, num_spare: int = 0) -> bool:
        """Give a sequence without blocks its cached prefix and take the blocks for all its other tokens.

        Its last token is always left to compute. False, and the sequence has nothing, unless `num_spare` blocks would
        stay free.
        """
        num_free = self._pool.num_free
        if sequence is self._refused and num_free < self._num_free_wanted:
            return False
        self._look_up(sequence)
        num_missing = self.num_missing(sequence)
        if num_missing + num_spare <= self._pool.num_free and self.grow(sequence):
            self._refused = None
            return True
        self._refused = sequence
        self._num_free_wanted = num_missing + num_free - self._pool.num_free
        self.release(sequence)
        return False

    def num_own(self, sequence: Sequence) -> int:
        """Return how many blocks a choice needs beside those that it shares, for its tokens and one more."""
        return -(-(sequence.num_tokens + 1) // self._block_size) - sequence.num_common // self._block_size

    def num_to_begin(self, sequence: Sequence) -> int:
        """Return how many of these it needs for the prompt and one more token, whatever was shown of it."""
        return -(-(sequence.num_prompt + 1) // self._block_size) - sequence.num_common // self._block_size

    def num_beside(self, sequence: Sequence) -> int:
        """Return how many blocks the pool has beyond those for the sequence's present tokens."""
        return self._pool.num_total - len(sequence.block_ids) - self.num_missing(sequence)

    def num_spanned(self, leader: Sequence, followers: Iterable[Sequence]) -> int:
        """Return how many tokens the blocks hold that the choices of a request need together at their beginning."""
        num_blocks = -(-leader.num_prompt // self._block_size) + sum(map(self.num_to_begin, followers))
        return num_blocks * self._block_size

    def branch(self, sequence: Sequence, source: Sequence, num_spare: int = 0) -> tuple[BlockCopy, ...] | None:
        """Give a choice without blocks what it has in common with `source`, which has computed their prompt.

        Full blocks are shared. The one that the choice writes into is its own; what the prompt has left there is to be
        copied before anything is computed. Its last token is always left to compute. None, and the sequence has
        nothing, unless `num_spare` blocks would stay free.
        """
        num_shared, num_copied = divmod(sequence.num_common, self._block_size)
        num_missing = self.num_missing(sequence) - num_shared
        if num_missing + num_spare > self._pool.num_free:
            return None
        sequence.block_ids = source.block_ids[:num_shared]
        self._prefix.branch(sequence.hash_chain, source.hash_chain, sequence.block_ids)
        assert self.grow(sequence)
        sequence.num_computed = sequence.num_common
        sequence.num_cached = num_shared * self._block_size
        return (BlockCopy(source.block_ids[num_shared], sequence.block_ids[num_shared]),) if num_copied else ()

    def grow(self, sequence: Sequence) -> bool:
        """Take what the sequence's present tokens lack; False, and nothing changes, if there is not enough."""
        num_missing = self.num_missing(sequence)
        if not num_missing:
            return True
        taken = self._pool.take(num_missing)
        if taken is None:
            return False
        sequence.block_ids += taken
        return True

    def advance(self, sequence: Sequence, length: int) -> None:
        """Record that the next `length` tokens are computed; publish the blocks that this completes."""
        before = sequence.num_computed // self._block_size
        sequence.num_computed += length
        if sequence.num_computed // self._block_size > before:
            self._prefix.publish(sequence.token_ids, sequence.hash_chain, sequence.block_ids, sequence.num_computed)

    def forget(self, sequence: Sequence) -> None:
        """Make sure that nobody hits the sequence's blocks: their content is suspect."""
        self._prefix.forget(sequence.block_ids)

    def release(self, sequence: Sequence) -> None:
        """Let go of every block; the sequence keeps its tokens and would compute them all again, and with them what it
        lacks of the logprobs of its prompt."""
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.num_cached = 0

    def violations(self, sequences: Collection[Sequence], copies: Iterable[Iterable[BlockId]] = ()) -> list[str]:
        """Return what is wrong with the accounts of all blocks, see `common.scheduling.audit`."""
        return violations(self._pool, self._prefix, self._block_size, sequences, copies)

    def _look_up(self, sequence: Sequence) -> None:
        assert not sequence.block_ids
        max_tokens = 0 if sequence.wants_prompt_logprobs else sequence.num_tokens - 1
        sequence.block_ids = self._prefix.match(sequence.token_ids, sequence.hash_chain, max_tokens)
        sequence.num_cached = len(sequence.block_ids) * self._block_size
        sequence.num_computed = sequence.num_cached
