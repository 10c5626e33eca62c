"""The key itself: drawn, checked for typing errors, and hashed.

`tdm-`, 32 random bytes and the CRC-32 of both, in URL-safe base64: who scans for leaked secrets can tell that it is
one, and a mistyped key is refused without being looked for. The checksum protects nothing.

What is kept is the plain SHA-256 of the key. Slow hashes (bcrypt, Argon2) make guessing passwords expensive; a key of
256 random bits cannot be guessed at any speed, and every request pays for the hash.
"""

import re
import secrets
from base64 import urlsafe_b64encode
from hashlib import sha256
from zlib import crc32

PREFIX = "tdm-"
NUM_RANDOM_BYTES = 32

_SHAPE = re.compile(r"(?P<body>tdm-[A-Za-z0-9_-]{43})(?P<checksum>[A-Za-z0-9_-]{6})")


def new_key() -> str:
    """Return a key that nobody has."""
    body = PREFIX + _base64(secrets.token_bytes(NUM_RANDOM_BYTES))
    return body + _checksum(body)


def is_well_formed(key: str) -> bool:
    """Whether this can be a key at all."""
    match = _SHAPE.fullmatch(key)
    return match is not None and _checksum(match["body"]) == match["checksum"]


def digest_of(key: str) -> str:
    """Return what is kept of a key: its SHA-256 in hex."""
    return sha256(key.encode()).hexdigest()


def _checksum(body: str) -> str:
    return _base64(crc32(body.encode()).to_bytes(4, "big"))


def _base64(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")
