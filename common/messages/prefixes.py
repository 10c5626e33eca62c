"""Names of prefixes: a chain of hashes over the full blocks of a prompt, the same in a worker's cache and in a gateway.

A prefix is named by SHA-256 over (name of the prefix before its last block, token ids of that block), rooted in the
model's fingerprint and the cache salt. Processes tell each other short names, the first bytes of these, and only those
of every so many tokens: enough to find who has most of a prompt, and never a reason to use what is found there without
comparing.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

HashFunction = Callable[[bytes], bytes]

SHORT_BYTES = 8
GRAIN_TOKENS = 64
"""Short names are told of prefixes so long and of every multiple; of each block, where blocks are longer."""

MAX_BLOCKS = 4096
"""A gateway names no more blocks of a prompt than this: it takes 0.7 us each."""

MAX_NAMES = 16
"""So many prefixes of a prompt are looked for at most, in one look: what a worker has is known to an eighth of it."""

ID_BYTES = 4


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`."""
    return hashlib.sha256(data).digest()


def root_of(fingerprint: str, salt: str, hash_function: HashFunction = sha256) -> bytes:
    """Return the name of the empty prefix."""
    mark = fingerprint.encode()
    return hash_function(len(mark).to_bytes(8, "little") + mark + salt.encode())


def extend(parent: bytes, packed_ids: bytes, hash_function: HashFunction = sha256) -> bytes:
    """Return the name of the prefix that continues `parent` by one block of ids (as `pack_ids` has them)."""
    return hash_function(parent + packed_ids)


def short_name(digest: bytes) -> bytes:
    """Return what others are told."""
    return digest[:SHORT_BYTES]


def blocks_per_grain(block_size: int) -> int:
    """Return how many blocks lie between two prefixes that are told."""
    return max(1, GRAIN_TOKENS // block_size)


@dataclass(frozen=True, slots=True)
class PromptPrefixes:
    """The short names of some prefixes of a prompt, each `grain` tokens longer than the one before."""

    names: tuple[bytes, ...] = ()
    grain: int = GRAIN_TOKENS


NO_PREFIXES = PromptPrefixes()


def name_prefixes(packed_ids: bytes, block_size: int, fingerprint: str, salt: str) -> PromptPrefixes:
    """Return the names of at most `MAX_NAMES` prefixes, evenly spread over its first `MAX_BLOCKS` blocks."""
    num_told = blocks_per_grain(block_size)
    num_grains = min(len(packed_ids) // (block_size * ID_BYTES), MAX_BLOCKS) // num_told
    num_blocks = num_told * -(-num_grains // MAX_NAMES)
    digest, names = root_of(fingerprint, salt), []
    for block in range(num_told * num_grains):
        start = block * block_size * ID_BYTES
        digest = extend(digest, packed_ids[start : start + block_size * ID_BYTES])
        if (block + 1) % num_blocks == 0:
            names.append(short_name(digest))
    return PromptPrefixes(tuple(names), num_blocks * block_size) if names else NO_PREFIXES
