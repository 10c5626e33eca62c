"""A failed call in our own terms."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from common.errors import IncompatiblePeer, PeerError, PeerUnreachable

ReplyT = TypeVar("ReplyT")

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


async def reply_from(peer: str, call: Awaitable[ReplyT]) -> ReplyT:
    """Await a unary call; raises `PeerUnreachable` or `IncompatiblePeer`.

    A channel that is dropped because its peer has restarted cancels its calls. That is a failure of the call, and must
    not look like a cancellation of the caller, which would end its task without a word.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise peer_error(error, peer) from error
    except grpc.aio.UsageError as error:
        raise PeerUnreachable(f"{peer}: its channel was dropped before the call") from error
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        raise PeerUnreachable(f"{peer}: its channel was dropped during the call") from None
