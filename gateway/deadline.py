"""The time that a request has: from its header, else the gateway's default; counted from its arrival.

One limit stands around everything that is done for the request (admission, tokenising, waiting, prefill, decode, a slow
reader), so that no stage needs a limit of its own. Its engine is told what is left, for what travels beyond this
process.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from types import TracebackType

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

    def enforced(self) -> "Enforced":
        """End what the block does when the time is over: what it awaits is cancelled and `DeadlineExceeded` raised."""
        return Enforced(self.left_s)


class Enforced:
    """A block that has `left_s` seconds, None: no limit."""

    def __init__(self, left_s: float | None) -> None:
        self._limit = None if left_s is None else asyncio.timeout(left_s)

    async def __aenter__(self) -> None:
        if self._limit is not None:
            await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._limit is None:
            return
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineExceeded("The request's time is over.") from late
        if isinstance(error, TimeoutError) and self._limit.expired():
            raise DeadlineExceeded("The request's time is over.") from error
