"""A failed call in our own terms."""

import grpc

from common.errors import IncompatiblePeer, PeerError, PeerUnreachable

_INCOMPATIBLE = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
"""Trying again does not help: the peer has another secret, speaks another version or rejects what we say."""


def peer_error(error: grpc.aio.AioRpcError, peer: str) -> PeerError:
    """Return the `IncompatiblePeer` or `PeerUnreachable` to raise from `error`."""
    code = error.code()
    reason = f"{peer}: {code.name.lower()}: {error.details() or 'no details'}"
    return IncompatiblePeer(reason) if code in _INCOMPATIBLE else PeerUnreachable(reason)
