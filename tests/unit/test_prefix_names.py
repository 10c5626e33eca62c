"""Names of prefixes: the same for a gateway and a worker's cache, and others for other models and salts."""

import pytest

from common.cache.journal import PrefixJournal
from common.cache.pool import BlockPool
from common.cache.prefix import HashChain, PrefixCache
from common.messages.codec import pack_ids
from common.messages.prefixes import MAX_BLOCKS, MAX_NAMES, SHORT_BYTES, blocks_per_grain, name_prefixes


def journaled(num_tokens: int, block_size: int, *, num_computed: int | None = None) -> list[tuple[bytes, bool]]:
    """Return what a worker's cache notes when a prompt was computed."""
    num_blocks = -(-num_tokens // block_size)
    pool, journal = BlockPool(num_blocks, [0] * num_blocks), PrefixJournal()
    cache = PrefixCache(pool, block_size, "model", journal=journal)
    blocks = pool.take(num_blocks)
    assert blocks is not None
    cache.publish(range(num_tokens), HashChain("salt"), blocks, num_tokens if num_computed is None else num_computed)
    noted = list(journal.take())
    assert list(journal.take()) == []
    cache.forget(blocks)
    gone = list(journal.take())
    assert {name for name, _ in noted} <= {name for name, is_there in gone if not is_there}
    return noted


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("num_tokens", [0, 63, 64, 300, 1000])
def test_a_worker_tells_what_a_gateway_looks_for(block_size: int, num_tokens: int) -> None:
    prefixes = name_prefixes(pack_ids(range(num_tokens)), block_size, "model", "salt")
    noted = [name for name, is_there in journaled(num_tokens, block_size) if is_there]
    assert set(prefixes.names) <= set(noted)
    assert len(noted) == num_tokens // max(64, block_size)
    assert len(prefixes.names) == min(len(noted), MAX_NAMES)
    assert all(noted.index(name) == depth for depth, name in enumerate(prefixes.names))
    assert prefixes.grain == (max(64, block_size) if noted else 64)


@pytest.mark.parametrize("num_tokens", [1024, 1088, 5000, 40_000, 65_536, 200_000])
def test_a_long_prompt_has_no_more_names(num_tokens: int) -> None:
    prefixes = name_prefixes(pack_ids(range(num_tokens)), 16, "model", "salt")
    assert MAX_NAMES / 2 <= len(prefixes.names) <= MAX_NAMES
    assert prefixes.grain % (16 * blocks_per_grain(16)) == 0
    assert prefixes.grain * len(prefixes.names) > min(num_tokens, 16 * MAX_BLOCKS) - prefixes.grain
    assert all(len(name) == SHORT_BYTES for name in prefixes.names)


def test_conversations_of_any_length_have_names_in_common() -> None:
    told = {name for name, _ in journaled(4000, 16)}
    for num_tokens in (4000, 4700, 9000, 30_000):
        prefixes = name_prefixes(pack_ids(range(num_tokens)), 16, "model", "salt")
        known = [depth for depth, name in enumerate(prefixes.names, 1) if name in told]
        assert 4000 - prefixes.grain < prefixes.grain * max(known) <= 4000


@pytest.mark.parametrize(("model", "salt"), [("other", "salt"), ("model", "other"), ("model", ""), ("models", "alt")])
def test_other_models_and_salts_have_other_names(model: str, salt: str) -> None:
    packed = pack_ids(range(640))
    assert not {*name_prefixes(packed, 16, model, salt).names} & {*name_prefixes(packed, 16, "model", "salt").names}


def test_a_journal_that_nobody_takes_forgets_the_oldest() -> None:
    journal = PrefixJournal(max_entries=2)
    for name in (b"a", b"b", b"c"):
        journal.note(name, is_there=True)
    assert list(journal.take()) == [(b"b", True), (b"c", True)]
