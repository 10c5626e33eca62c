"""Bugs of the pool of blocks and of the prefix cache."""

from tests.planted.plant import Plant

POOL = "tests/unit/test_block_pool.py"
LEASES = "tests/property/test_leases.py"
POOL_MACHINE = "tests/property/test_block_pool.py"
DECODE_MACHINE = "tests/property/test_decode_scheduler.py"
PREFILL_MACHINE = "tests/property/test_prefill_scheduler.py"

PLANTS = (
    Plant(
        name="GEN_LATE",
        rule="The generation of a block changes before its page can be written again.",
        file="common/cache/pool.py",
        text="        self._generations[block] += 1  # first: ",
        replacement="        for late in self._free[-1:]:\n            self._generations[late] += 1  # ",
        tests=(f"{POOL}::TestPool::test_the_generation_changes_before_the_block_can_be_taken", POOL_MACHINE, LEASES),
    ),
    Plant(
        name="cached-generation-changes",
        rule="A cached block keeps its generation: what references say of it still holds.",
        file="common/cache/pool.py",
        text="                self._unreferenced[block] = None\n            else:\n",
        replacement=(
            "                self._unreferenced[block] = None\n"
            "                self._generations[block] += 1\n"
            "            else:\n"
        ),
        tests=(f"{POOL}::TestPrefixCache::test_a_cached_block_keeps_its_generation_until_it_is_evicted",),
    ),
    Plant(
        name="evicted-under-its-generation",
        rule="Eviction changes the generation of a block.",
        file="common/cache/pool.py",
        text="            del self._unreferenced[block]\n            self._free_up(block)\n",
        replacement="            del self._unreferenced[block]\n            self._free.append(block)\n",
        tests=(
            f"{POOL}::TestPrefixCache::test_a_cached_block_keeps_its_generation_until_it_is_evicted",
            POOL_MACHINE,
        ),
    ),
    Plant(
        name="hit-unpinned",
        rule="A hit is owned before pages are taken for the rest.",
        file="common/cache/prefix.py",
        text="        self._pool.share(found)\n",
        replacement="",
        tests=(POOL_MACHINE, DECODE_MACHINE, PREFILL_MACHINE),
    ),
    Plant(
        name="freed-with-the-first-owner",
        rule="A block is free when its last owner lets go.",
        file="common/cache/pool.py",
        text="            if self._num_owners[block]:\n                continue\n",
        replacement="",
        tests=(f"{POOL}::TestPool::test_a_block_is_free_when_the_last_owner_lets_go", POOL_MACHINE),
    ),
    Plant(
        name="evicted-but-known",
        rule="The prefix cache forgets a block before it is reused.",
        file="common/cache/pool.py",
        text="        self.discard(block)\n        evicted(block)\n",
        replacement="        self.discard(block)\n",
        tests=(POOL_MACHINE, DECODE_MACHINE, PREFILL_MACHINE),
    ),
    Plant(
        name="newest-evicted",
        rule="What was released longest ago is evicted first.",
        file="common/cache/pool.py",
        text="            self._evict(next(iter(self._unreferenced)))\n",
        replacement="            self._evict(next(reversed(self._unreferenced)))\n",
        tests=(f"{POOL}::TestPrefixCache::test_tails_are_evicted_before_heads_and_old_before_new",),
    ),
    Plant(
        name="heads-evicted-first",
        rule="The tail of a prefix is evicted before its head.",
        file="common/cache/pool.py",
        text="        for block in reversed(block_ids):\n            assert self._num_owners[block] > 0, f",
        replacement="        for block in block_ids:\n            assert self._num_owners[block] > 0, f",
        tests=(f"{POOL}::TestPrefixCache::test_tails_are_evicted_before_heads_and_old_before_new",),
    ),
    Plant(
        name="hash-is-enough",
        rule="A hit compares the token ids: equal hashes are not enough.",
        file="common/cache/prefix.py",
        text="            if entry is None or not entry.node.is_same_prefix(node):\n",
        replacement="            if entry is None:\n",
        tests=(
            f"{POOL}::TestCollisions::test_another_prompt_with_the_same_hash_is_a_miss",
            f"{POOL}::TestCollisions::test_the_tokens_before_the_block_count_too",
            POOL_MACHINE,
        ),
    ),
    Plant(
        name="salt-ignored",
        rule="Prompts of different salts share no block.",
        file="common/cache/prefix.py",
        text=(
            "root_of(self._fingerprint, chain.salt, self._hash)\n"
            "            digest = extend(root, pack_ids(ids), self._hash)\n"
            "            nodes.append(PrefixNode(digest, parent, ids, chain.salt))"
        ),
        replacement=(
            'root_of(self._fingerprint, "", self._hash)\n'
            "            digest = extend(root, pack_ids(ids), self._hash)\n"
            '            nodes.append(PrefixNode(digest, parent, ids, ""))'
        ),
        tests=(f"{POOL}::TestPrefixCache::test_a_salt_and_a_fingerprint_isolate",),
    ),
    Plant(
        name="fingerprint-ignored",
        rule="Blocks of another model are never hit.",
        file="common/messages/prefixes.py",
        text='len(mark).to_bytes(8, "little") + mark + salt.encode()',
        replacement="salt.encode()",
        tests=(f"{POOL}::TestPrefixCache::test_a_salt_and_a_fingerprint_isolate",),
    ),
    Plant(
        name="published-when-reserved",
        rule="A block enters the prefix cache when its content is complete, never when it is reserved.",
        file="common/scheduling/blocks.py",
        text="            self._refused = None\n            return True\n",
        replacement=(
            "            self._refused = None\n"
            "            self._prefix.publish(\n"
            "                sequence.token_ids, sequence.hash_chain, sequence.block_ids, sequence.num_tokens\n"
            "            )\n"
            "            return True\n"
        ),
        tests=(
            "tests/unit/test_remote_prefill.py",
            DECODE_MACHINE,
            PREFILL_MACHINE,
        ),
    ),
    Plant(
        name="published-too-far",
        rule="Only blocks that are computed to their last token are published.",
        file="common/cache/prefix.py",
        text="in range(chain.num_published, num_computed // self._block_size):",
        replacement="in range(chain.num_published, min(len(block_ids), -(-num_computed // self._block_size))):",
        tests=(POOL_MACHINE, PREFILL_MACHINE),
    ),
    Plant(
        name="failed-blocks-stay",
        rule="The blocks of a failed request leave the prefix cache.",
        file="common/scheduling/blocks.py",
        text="        self._prefix.forget(sequence.block_ids)\n",
        replacement="        return\n",
        tests=(
            "tests/unit/test_prefill_scheduler.py::test_nan_fails_one_prompt_and_its_blocks_leave_the_cache",
            "tests/unit/test_decode_scheduler.py::TestBatch::test_nan_fails_one_row_alone",
        ),
    ),
    Plant(
        name="forgotten-but-cached",
        rule="A forgotten block is free at once, or with its last owner.",
        file="common/cache/prefix.py",
        text="                self._drop(block)\n                self._pool.discard(block)\n",
        replacement="                self._drop(block)\n",
        tests=(f"{POOL}::TestPrefixCache::test_a_forgotten_block_is_free_at_once_or_with_its_last_owner",),
    ),
)
