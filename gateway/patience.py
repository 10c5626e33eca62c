"""A limit on each of many short waits, by one timer for all of them.

A timer per wait (`asyncio.timeout`) cost a quarter of the gateway's time per token: three waits per token, 8 us each.

A timer that fires late tells of a pause of this process (stopped, suspended, starved). What others did meanwhile waits
in the sockets, so nobody's patience ends before they were read.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

LATE_S = 1.0
"""So late does no timer fire because the event loop is busy."""

GRACE_S = 2.0
"""What a wait gets after a pause, once."""


class Patience:
    """Entered around one wait after the other, by one task at a time; a wait above the limit raises `TimeoutError`.

    `has_moved` is asked then: if what is waited for has moved since it was asked last, the wait begins anew.
    Must be closed, or its timer outlives its owner by up to the limit.
    """

    def __init__(self, limit_s: float, has_moved: Callable[[], bool] | None = None) -> None:
        self._limit_s = limit_s
        self._has_moved = has_moved
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline_s = 0.0
        """Of the wait under way."""
        self._task: asyncio.Task[object] | None = None
        """Who waits; None: nobody does."""
        self._num_cancels = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_s = 0.0
        self._is_over = False

    def __enter__(self) -> Self:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None  # only tasks wait
        self._task, self._num_cancels, self._is_over = task, task.cancelling(), False
        self._deadline_s = loop.time() + self._limit_s
        if self._timer is None:
            self._look_at(self._deadline_s, loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return
        if task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def renew(self) -> None:
        """Let the wait under way, if there is one, begin anew."""
        if self._task is not None and self._loop is not None:
            self._deadline_s = self._loop.time() + self._limit_s

    @property
    def is_over(self) -> bool:
        """Whether the last wait was ended by the limit."""
        return self._is_over

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._look_s = when_s
        self._timer = loop.call_at(when_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End a wait that is too long; else look again when the present one would be, if there is one."""
        self._timer = None
        if self._task is None:
            return
        if loop.time() - self._look_s > LATE_S:
            self._deadline_s = max(self._deadline_s, loop.time() + GRACE_S)
        if loop.time() >= self._deadline_s and self._has_moved is not None and self._has_moved():
            self._deadline_s = loop.time() + self._limit_s
        if loop.time() < self._deadline_s:
            self._look_at(self._deadline_s, loop)
            return
        self._is_over = True
        self._task.cancel()
