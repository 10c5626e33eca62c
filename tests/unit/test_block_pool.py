"""Block pool and prefix cache: the rules that need an exact order of events."""

from collections import UserList
from typing import Any

import pytest

from common.cache.pool import BlockPool
from common.cache.prefix import HashChain, PrefixCache
from common.messages.ids import BlockId
from common.messages.prefixes import HashFunction


def _publish(pool: BlockPool, prefix: PrefixCache, token_ids: list[int]) -> list[BlockId]:
    blocks = pool.take(len(token_ids) // 2)
    assert blocks is not None
    prefix.publish(token_ids, HashChain(""), blocks, len(token_ids))
    return blocks


def _match(prefix: PrefixCache, token_ids: list[int], salt: str = "") -> list[BlockId]:
    return prefix.match(token_ids, HashChain(salt), len(token_ids))


class WatchedGenerations(UserList[int]):
    """Remembers how many blocks could be taken at each change."""

    pool: BlockPool

    def __setitem__(self, index: Any, value: Any) -> None:
        self.num_free_at_change = self.pool.num_free
        super().__setitem__(index, value)


class TestPool:
    def test_take_is_all_or_nothing(self) -> None:
        pool = BlockPool(3, [0] * 3)
        assert pool.take(4) is None
        assert pool.num_free == 3
        assert pool.take(0) == []

    def test_a_block_is_free_when_the_last_owner_lets_go(self) -> None:
        pool = BlockPool(2, [0, 0])
        blocks = pool.take(1)
        assert blocks is not None
        pool.share(blocks)
        pool.release(blocks)
        assert (pool.num_free, pool.num_referenced, pool.generation(blocks[0])) == (1, 1, 0)
        pool.release(blocks)
        assert (pool.num_free, pool.num_referenced, pool.generation(blocks[0])) == (2, 0, 1)

    def test_the_generation_changes_before_the_block_can_be_taken(self) -> None:
        generations = WatchedGenerations([0, 0])
        pool = generations.pool = BlockPool(2, generations)
        blocks = pool.take(2)
        assert blocks is not None
        pool.release(blocks[:1])
        assert generations.num_free_at_change == 0
        assert pool.num_free == 1

    def test_releasing_without_owning_is_noticed(self) -> None:
        pool = BlockPool(1, [0])
        with pytest.raises(AssertionError, match="no owner"):
            pool.release([BlockId(0)])

    def test_check_says_what_is_wrong(self) -> None:
        pool = BlockPool(2, [0, 0])
        pool.check()
        pool._num_owners[0] = 1
        with pytest.raises(AssertionError, match="free and referenced"):
            pool.check()


class TestPrefixCache:
    def test_a_cached_block_keeps_its_generation_until_it_is_evicted(self) -> None:
        pool = BlockPool(1, [0])
        prefix = PrefixCache(pool, 2, "f")
        blocks = _publish(pool, prefix, [1, 2])
        pool.release(blocks)
        assert (pool.num_cached, pool.num_free, pool.generation(blocks[0])) == (1, 1, 0)
        assert pool.take(1) == blocks
        assert (pool.num_cached, pool.generation(blocks[0])) == (0, 1)
        assert _match(prefix, [1, 2]) == []

    def test_tails_are_evicted_before_heads_and_old_before_new(self) -> None:
        pool = BlockPool(4, [0] * 4)
        prefix = PrefixCache(pool, 2, "f")
        old = _publish(pool, prefix, [1, 1, 2, 2])
        new = _publish(pool, prefix, [3, 3, 4, 4])
        pool.release(old)
        pool.release(new)
        assert pool.take(1) == [old[1]]
        assert pool.take(1) == [old[0]]
        assert pool.take(1) == [new[1]]
        assert _match(prefix, [3, 3, 4, 4]) == [new[0]]

    def test_free_blocks_are_taken_before_cached_ones(self) -> None:
        pool = BlockPool(2, [0, 0])
        prefix = PrefixCache(pool, 2, "f")
        blocks = _publish(pool, prefix, [1, 2])
        pool.release(blocks)
        assert pool.take(1) != blocks
        assert pool.num_cached == 1

    def test_an_equal_block_stays_private(self) -> None:
        pool = BlockPool(2, [0, 0])
        prefix = PrefixCache(pool, 2, "f")
        first = _publish(pool, prefix, [1, 2])
        second = _publish(pool, prefix, [1, 2])
        pool.release(second)
        assert pool.num_cached == 0
        assert _match(prefix, [1, 2]) == first

    def test_publishing_again_changes_nothing(self) -> None:
        pool = BlockPool(1, [0])
        prefix = PrefixCache(pool, 2, "f")
        blocks = pool.take(1)
        assert blocks is not None
        for chain in (first := HashChain(""), first, HashChain("")):
            prefix.publish([1, 2], chain, blocks, 2)
        pool.release(blocks)
        pool.check()
        assert pool.num_cached == 1

    def test_a_chain_publishes_again_behind_a_new_match(self) -> None:
        """A preempted sequence whose blocks were evicted meanwhile registers the ones that it computes again."""
        pool = BlockPool(2, [0, 0])
        prefix = PrefixCache(pool, 2, "f")
        chain = HashChain("")
        blocks = pool.take(1)
        assert blocks is not None
        prefix.publish([1, 2, 3], chain, blocks, 2)
        pool.release(blocks)
        everything = pool.take(2)
        assert everything is not None
        assert prefix.match([1, 2, 3], chain, 2) == []
        prefix.publish([1, 2, 3], chain, everything, 2)
        assert _match(prefix, [1, 2]) == everything[:1]

    def test_only_full_blocks_within_the_limit_are_hit(self) -> None:
        pool = BlockPool(2, [0, 0])
        prefix = PrefixCache(pool, 2, "f")
        blocks = _publish(pool, prefix, [1, 2, 3, 4])
        assert prefix.match([1, 2, 3, 4], HashChain(""), 3) == blocks[:1]
        assert prefix.match([1, 2, 3], HashChain(""), 99) == blocks[:1]

    def test_a_salt_and_a_fingerprint_isolate(self) -> None:
        pool = BlockPool(1, [0])
        hashed: dict[str, bytes] = {}
        for fingerprint in ("f", "g"):
            chain = HashChain("")
            PrefixCache(pool, 2, fingerprint).match([1, 2], chain, 2)
            hashed[fingerprint] = chain.nodes[0].digest
        assert hashed["f"] != hashed["g"]
        prefix = PrefixCache(pool, 2, "f")
        _publish(pool, prefix, [1, 2])
        assert _match(prefix, [1, 2], "tenant") == []

    def test_a_forgotten_block_is_free_at_once_or_with_its_last_owner(self) -> None:
        pool = BlockPool(2, [0, 0])
        prefix = PrefixCache(pool, 2, "f")
        blocks = _publish(pool, prefix, [1, 2, 3, 4])
        pool.release(blocks[1:])
        prefix.forget(blocks)
        assert (pool.num_cached, pool.num_free, pool.generation(blocks[1])) == (0, 1, 1)
        assert pool.generation(blocks[0]) == 0
        pool.release(blocks[:1])
        assert (pool.num_free, pool.generation(blocks[0])) == (2, 1)
        assert _match(prefix, [1, 2]) == []


class TestCollisions:
    """B065: with a weak hash, another prefix is a miss."""

    @pytest.fixture(params=[lambda data: b"\x07", lambda data: bytes([sum(data) % 256])], ids=["constant", "8 bits"])
    def weak(self, request: pytest.FixtureRequest) -> HashFunction:
        function: HashFunction = request.param
        return function

    def test_another_prompt_with_the_same_hash_is_a_miss(self, weak: HashFunction) -> None:
        pool = BlockPool(4, [0] * 4)
        prefix = PrefixCache(pool, 2, "f", weak)
        blocks = _publish(pool, prefix, [1, 4])
        assert _match(prefix, [1, 4]) == blocks
        assert _match(prefix, [2, 3]) == []
        other = _publish(pool, prefix, [2, 3])
        assert _match(prefix, [2, 3]) == []
        pool.release(other)
        assert pool.num_cached == 0

    def test_the_tokens_before_the_block_count_too(self) -> None:
        """The head of A is evicted, that of B comes under the same hash: A's tail must not be hit behind it."""
        pool = BlockPool(3, [0] * 3)
        prefix = PrefixCache(pool, 2, "f", lambda data: bytes([sum(data) % 256]))
        a = _publish(pool, prefix, [1, 4, 9, 9])
        pool.release(a[:1])
        taken = pool.take(2)
        assert taken is not None
        assert a[0] in taken
        b = taken[:1]
        prefix.publish([2, 3], HashChain(""), b, 2)
        assert _match(prefix, [2, 3, 9, 9]) == b
