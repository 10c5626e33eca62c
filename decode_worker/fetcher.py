"""Brings announced pages into our pool, and compares their bytes with the checksums that their sender announced."""

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence

from common.errors import PageCorrupt, PeerUnreachable
from common.messages.ids import BlockId
from common.messages.registry import WorkerRecord
from common.transfer.protocols import PageCopy, PagePuller


class Fetcher:
    """Pulls into the pool whose pages `page` returns as bytes."""

    def __init__(self, puller: PagePuller, page: Callable[[BlockId], memoryview]) -> None:
        self._puller = puller
        self._page = page

    async def fetch(
        self, source: WorkerRecord, copies: Sequence[PageCopy], checksums: Mapping[BlockId, int] | None = None
    ) -> None:
        """Copy the pages and verify those whose CRC-32 is given, by our block; nothing may be used if it raises.

        Raises `PageCorrupt`, and what `PagePuller.pull` does. Afterwards nothing writes into the pages any more.
        """
        if source.transfer is None:
            raise PeerUnreachable(f"{source.worker} serves no pages")
        await self._puller.pull(source.transfer, source.epoch, copies)
        if checksums:
            await asyncio.to_thread(self._verify, source, checksums)

    def _verify(self, source: WorkerRecord, checksums: Mapping[BlockId, int]) -> None:
        for block, announced in checksums.items():
            found = zlib.crc32(self._page(block))
            if found != announced:
                raise PageCorrupt(
                    f"page {block} came from {source.worker} with checksum {found:#010x} instead of {announced:#010x}"
                )
