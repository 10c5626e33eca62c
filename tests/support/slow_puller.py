"""A page puller whose copies take as long as a test wants, and which cannot be interrupted in the middle of one."""

import asyncio
from collections.abc import Sequence

from common.lifecycle.uninterrupted import uninterrupted
from common.messages.ids import Epoch
from common.messages.registry import TransferEndpoint
from common.transfer.protocols import PageCopy, PagePuller


class SlowPuller:
    """Implements `PagePuller`: like a copy thread, a cancelled pull returns only when its copy has ended."""

    def __init__(self, inner: PagePuller) -> None:
        self._inner = inner
        self.gate = asyncio.Event()
        """Copies wait for it; set at first."""
        self.gate.set()
        self.error: Exception | None = None
        """What every pull raises from now on."""
        self.num_running = 0
        self.copied: list[PageCopy] = []
        """Every page that was pulled, again if it was pulled again."""

    async def connect(self, endpoint: TransferEndpoint, epoch: Epoch) -> None:
        """See `PagePuller.connect`."""
        await self._inner.connect(endpoint, epoch)

    async def pull(self, endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        """See `PagePuller.pull`."""
        self.num_running += 1
        try:
            await uninterrupted(self._copy(endpoint, epoch, copies))
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        """See `PagePuller.close`."""
        await self._inner.close()

    async def _copy(self, endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.copied += copies
        await self._inner.pull(endpoint, epoch, copies)
