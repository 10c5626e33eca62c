"""How a page source and a puller convince each other that they share the cluster's secret and mean the same pool.

    source -> puller   Challenge   magic, source's nonce
    puller -> source   Claim       magic, puller's nonce, wanted epoch and page size, proof
    source -> puller   Answer      verdict, number of blocks, proof

A proof is HMAC-SHA256 over both nonces, the transport and everything that was said, so none can be replayed or moved
to another connection, and the two directions cannot be mirrored. The source learns nothing it could use elsewhere and
proves itself only to a puller that has proved itself.
"""

import enum
import hmac
import os
import struct
from dataclasses import dataclass

from common.errors import IncompatiblePeer, InvalidSetting, PeerUnreachable
from common.messages.ids import Epoch
from common.transfer.connection import Connection
from common.transfer.pool_header import PoolHeader

HANDSHAKE_TIMEOUT_S = 3.0
_MAGIC = b"tandemP1"
_NONCE_BYTES = 32
_CHALLENGE = struct.Struct("<8s32s")
_CLAIM = struct.Struct("<8s32sQQ32s")
_ANSWER = struct.Struct("<BQ32s")


class Transport(enum.StrEnum):
    """How pages travel; also a metric label."""

    MEMORY = "memory"
    SHARED_MEMORY = "shm"
    TCP = "tcp"


class _Verdict(enum.IntEnum):
    WELCOME = 0
    WRONG_SECRET = 1
    OTHER_EPOCH = 2
    OTHER_PAGE_SIZE = 3


@dataclass(frozen=True, slots=True)
class Secret:
    """The cluster's shared secret; kept out of logs and error messages."""

    _key: bytes

    @classmethod
    def of(cls, secret: str) -> "Secret":
        """Return the secret as a key; raise `InvalidSetting` if it is empty, which anybody would know."""
        if not secret:
            raise InvalidSetting("secret", "", "the cluster's secret must not be empty")
        return cls(secret.encode())

    def __repr__(self) -> str:
        return "Secret()"

    def proof(self, speaker: bytes, transport: Transport, *said: bytes) -> bytes:
        """Return the proof that `speaker` knows the secret and said this on this connection."""
        message = b"\0".join((b"tandem page transfer 1", speaker, transport.value.encode())) + b"\0" + b"".join(said)
        return hmac.digest(self._key, message, "sha256")


async def welcome(connection: Connection, secret: Secret, transport: Transport, pool: PoolHeader) -> None:
    """Authenticate a puller at the source; raises `PeerUnreachable` or `IncompatiblePeer` after telling it why."""
    nonce = os.urandom(_NONCE_BYTES)
    await connection.send(_CHALLENGE.pack(_MAGIC, nonce))
    magic, puller_nonce, epoch, page_bytes, proof = _CLAIM.unpack(await connection.receive(_CLAIM.size))
    if magic != _MAGIC:
        raise IncompatiblePeer(f"{connection.peer} does not speak the page protocol")
    claim = struct.pack("<QQ", epoch, page_bytes)
    if not hmac.compare_digest(proof, secret.proof(b"puller", transport, nonce, puller_nonce, claim)):
        await connection.send(_ANSWER.pack(_Verdict.WRONG_SECRET, 0, bytes(32)))
        raise IncompatiblePeer(f"{connection.peer} does not know the cluster's secret")
    verdict = _judge(pool, epoch, page_bytes)
    answer = struct.pack("<BQ", verdict, pool.num_blocks)
    await connection.send(answer + secret.proof(b"source", transport, puller_nonce, nonce, claim, answer))
    if verdict is not _Verdict.WELCOME:
        raise IncompatiblePeer(f"{connection.peer} wants another pool: {verdict.name.lower()}")


def _judge(pool: PoolHeader, epoch: int, page_bytes: int) -> _Verdict:
    if epoch != pool.epoch:
        return _Verdict.OTHER_EPOCH
    if page_bytes != pool.page_bytes:
        return _Verdict.OTHER_PAGE_SIZE
    return _Verdict.WELCOME


async def introduce(
    connection: Connection, secret: Secret, transport: Transport, epoch: Epoch, page_bytes: int
) -> PoolHeader:
    """Authenticate us at a source; return its pool.

    Raises `IncompatiblePeer` (secret, page size, protocol) or `PeerUnreachable` (gone, or restarted: another epoch).
    """
    magic, nonce = _CHALLENGE.unpack(await connection.receive(_CHALLENGE.size))
    if magic != _MAGIC:
        raise IncompatiblePeer(f"{connection.peer} does not speak the page protocol")
    own_nonce = os.urandom(_NONCE_BYTES)
    claim = struct.pack("<QQ", epoch, page_bytes)
    proof = secret.proof(b"puller", transport, nonce, own_nonce, claim)
    await connection.send(_MAGIC + own_nonce + claim + proof)
    reply = await connection.receive(_ANSWER.size)
    verdict, num_blocks, source_proof = _ANSWER.unpack(reply)
    if verdict == _Verdict.WRONG_SECRET:
        raise IncompatiblePeer(f"{connection.peer} has another cluster secret")
    expected = secret.proof(b"source", transport, own_nonce, nonce, claim, reply[: -len(source_proof)])
    if not hmac.compare_digest(source_proof, expected):
        raise IncompatiblePeer(f"{connection.peer} does not know the cluster's secret")
    _obey(verdict, connection.peer)
    return PoolHeader(epoch, page_bytes, num_blocks)


def _obey(verdict: int, peer: str) -> None:
    match verdict:
        case _Verdict.WELCOME:
            return
        case _Verdict.OTHER_EPOCH:
            raise PeerUnreachable(f"{peer} has restarted: the process that held the pages is gone")
        case _Verdict.OTHER_PAGE_SIZE:
            raise IncompatiblePeer(f"{peer} has pages of another size")
        case _:
            raise IncompatiblePeer(f"{peer} answered with an unknown verdict {verdict}")
