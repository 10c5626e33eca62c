"""A running hash over generated ids: two streams that differ in any token differ in every later chain value.

A token frame carries the chain of the ids it continues, so that a gateway notices when a worker's continuation was
computed from other tokens than the client was shown.
"""

from collections.abc import Iterable
from hashlib import blake2b

EMPTY_CHAIN = 0
"""Chain of no ids at all."""


def extend_chain(chain: int, token_id: int) -> int:
    """Return the 63-bit chain of the ids behind `chain` followed by `token_id`."""
    digest = blake2b(chain.to_bytes(8, "little") + token_id.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def chain_of(ids: Iterable[int]) -> int:
    """Return the chain of a whole list of ids."""
    chain = EMPTY_CHAIN
    for token_id in ids:
        chain = extend_chain(chain, token_id)
    return chain
