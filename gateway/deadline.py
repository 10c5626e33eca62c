"""The time that a request has: from its header, else the gateway's default; counted from its arrival.

One limit stands around everything that is done for the request (admission, tokenising, waiting, prefill, decode, a slow
reader), so that no stage needs a limit of its own. Its engine is told what is left, for what travels beyond this
process.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from common.errors import DeadlineExceeded, InvalidRequest

HEADER = "x-request-deadline-ms"
MAX_MS = 24 * 3600 * 1000

_NUMBER = re.compile(r"[0-9]{1,8}")


def limit_of(sent: Sequence[str], default_s: float | None) -> float | None:
    """Return the seconds that a request has, None for no limit. `sent` holds its headers of that name.

    Raises `InvalidRequest` naming the header.
    """
    if not sent:
        return default_s
    if len(sent) > 1 or not _NUMBER.fullmatch(sent[0]) or not 1 <= int(sent[0]) <= MAX_MS:
        raise InvalidRequest(
            f"`{HEADER}` must be one number of milliseconds from 1 to {MAX_MS}.", param=HEADER, code="invalid_deadline"
        )
    return int(sent[0]) / 1000


class Deadline:
    """When a request's time is over. `arrived_s` is its arrival on `clock`."""

    def __init__(self, limit_s: float | None, arrived_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end_s = None if limit_s is None else arrived_s + limit_s
        self._clock = clock

    @property
    def left_s(self) -> float | None:
        """Seconds left, negative when it is over; None: no limit."""
        return None if self._end_s is None else self._end_s - self._clock()

    def enforced(self) -> AbstractAsyncContextManager[None]:
        """End what the block does when the time is over: what it awaits is cancelled and `DeadlineExceeded` raised."""
        return nullcontext() if self._end_s is None else self._limited()

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(self.left_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded("The request's time is over.") from error
