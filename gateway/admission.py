"""Who may be served now: a bound on the requests in progress, and an orderly end of all of them.

Owned by the gateway's event loop. The bound is this process's own; limits that hold for all gateways come from Redis.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from common.errors import Draining, Overloaded

SMOOTHING = 0.1
"""Weight of the newest request in the average duration; about the last ten count."""

MAX_RETRY_AFTER_S = 60.0


class Permit:
    """The right to be in progress, released exactly once when the `with` block is left, however that happens."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._is_cut = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # permits are taken by request handlers
        self._task, self._num_cancels = task, task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.release(self)
        task, self._task = self._task, None
        if not self._is_cut or task is None:
            return
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise Draining("The server is shutting down and could not finish this request in time.") from error

    def cut(self) -> None:
        """End the request now: what it awaits is cancelled, and the `with` block raises `Draining`."""
        if self._task is not None and not self._is_cut:
            self._is_cut = True
            self._task.cancel()


class Admission:
    """Gives out permits."""

    def __init__(self, max_concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._started: dict[Permit, float] = {}
        self._mean_duration_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        """This process leaves: it is not ready, but serves what still arrives on the connections that are open."""
        self._is_over = False

    @property
    def num_running(self) -> int:
        """Requests in progress."""
        return len(self._started)

    def admit(self) -> Permit:
        """Return a permit; raises `Draining` or, with the time until one is likely free, `Overloaded`."""
        if self._is_over:
            raise Draining("The server is shutting down.", retry_after_s=1.0)
        if self.num_running >= self._max_concurrent:
            raise Overloaded(
                f"The server already works on {self.num_running} requests.", retry_after_s=self._retry_after_s()
            )
        permit = Permit(self)
        self._started[permit] = self._clock()
        self._idle.clear()
        return permit

    def release(self, permit: Permit) -> None:
        """Take a permit back; a second time does nothing."""
        started = self._started.pop(permit, None)
        if started is None:
            return
        duration_s = self._clock() - started
        self._mean_duration_s += SMOOTHING * (duration_s - self._mean_duration_s)
        if not self._started:
            self._idle.set()

    def begin_drain(self) -> None:
        """Be not ready from now on."""
        self.is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when no request is in progress."""
        await self._idle.wait()

    def end(self) -> int:
        """Refuse new requests and cut the running ones; return how many these were."""
        self.is_draining = self._is_over = True
        running = list(self._started)
        for permit in running:
            permit.cut()
        return len(running)

    def _retry_after_s(self) -> float:
        """Return how long it takes, at the rate of late, until one of the running requests is done."""
        return min(max(self._mean_duration_s / self._max_concurrent, 1.0), MAX_RETRY_AFTER_S)
