"""Incarnation numbers: a process draws one at start, and peers tell its lives apart by it."""

import secrets

from common.messages.ids import Epoch


def new_epoch() -> Epoch:
    """Return a random 63-bit number, never 0."""
    return Epoch(1 + secrets.randbelow((1 << 63) - 1))
