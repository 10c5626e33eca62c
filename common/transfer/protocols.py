"""The seam of page transfer: a source serves the pages of one pool, a puller copies pages of peers into its own pool.

Only the owner of a pool writes into it. Implementations: in process (tests), shared memory, TCP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.ids import BlockId, Epoch, Generation
from common.messages.registry import TransferEndpoint


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the peer's `source` page, if it still has `generation`, into our page `target`."""

    source: BlockId
    generation: Generation
    target: BlockId


class PageSource(Protocol):
    """Serves one pool to peers until closed."""

    async def start(self) -> TransferEndpoint:
        """Listen; return where."""

    async def close(self) -> None:
        """Stop listening and drop every connection."""


class PagePuller(Protocol):
    """Copies pages of peers. One per worker; connections to peers are kept, keyed by endpoint and epoch."""

    async def connect(self, endpoint: TransferEndpoint, epoch: Epoch) -> None:
        """Handshake with a peer ahead of the first pull; raises `PeerUnreachable` or `IncompatiblePeer`."""

    async def pull(self, endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        """Copy the pages; return when every one is verified.

        Raises `StalePage` if any reference was outdated (nothing may then be used), `PeerUnreachable` if the peer is
        gone. After the call has returned or raised - also by cancellation - nothing writes into the targets any more.
        """

    async def close(self) -> None:
        """Drop every connection."""
