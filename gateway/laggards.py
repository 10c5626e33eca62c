"""What waits in this gateway for clients that read more slowly than their answers are generated, bounded over all of
them.

A sequence is not paused for a slow client: it would keep pages of the KV cache for as long as that client likes to
read, while its tokens, packed, cost next to nothing. Only where all that waits together becomes too much the client
that is furthest behind loses its answer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from common.errors import ClientTooSlow
from gateway.streams import Stream

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""At the rate of a full gateway some 20 MB arrive meanwhile."""


class Laggards:
    """Looks at the streams of one gateway now and then: nothing is counted per token."""

    def __init__(self, streams: Callable[[], Iterable[Stream]], max_bytes: int) -> None:
        self._streams = streams
        self._max_bytes = max_bytes

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """End as many streams as there are too many bytes, those with most first."""
        behind = sorted(((stream.num_unread_bytes, stream) for stream in self._streams()), key=lambda pair: -pair[0])
        num_bytes = sum(size for size, _ in behind)
        for size, stream in behind:
            if num_bytes <= self._max_bytes:
                return
            extra = {"request_id": stream.request.request}
            logger.warning("ended, as %d bytes wait for its client", size, extra=extra)
            stream.drop_unread(ClientTooSlow("The client is too far behind: too much of its answer waits for it."))
            num_bytes -= size
