"""The requests that are being served here, so that one can be ended by its id at every stage: while it is admitted and
tokenised, waits, is computed, or is still on its way to its client."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from common.errors import RequestCancelled
from common.messages.ids import ANYBODY, RequestId, TenantId

CancelOfEngine = Callable[[RequestId, TenantId], bool]
"""Ends a tenant's request that the engine has, and returns whether it has it."""


class UnderWay:
    """Owned by the service. The engine ends what it has by itself; the task of any other request is interrupted."""

    def __init__(self, cancel_of_engine: CancelOfEngine | None = None) -> None:
        self._cancel_of_engine = cancel_of_engine
        self._stays: dict[RequestId, Stay] = {}

    def stay(self, request: RequestId, tenant: TenantId) -> "Stay":
        """Return the block in which a request of a tenant is served by the current task."""
        return Stay(self._stays, request, tenant)

    def cancel(self, request: RequestId, tenant: TenantId = ANYBODY) -> bool:
        """End a tenant's request; False if it has none of that id here."""
        if self._cancel_of_engine is not None and self._cancel_of_engine(request, tenant):
            return True
        stay = self._stays.get(request)
        if stay is None or stay.tenant != tenant:
            return False
        stay.cancel()
        return True


class Stay:
    """Raises `RequestCancelled` out of its block once the request is ended by its id."""

    def __init__(self, stays: "dict[RequestId, Stay]", request: RequestId, tenant: TenantId) -> None:
        self.tenant = tenant
        self._stays = stays
        self._request = request
        self._task: asyncio.Task[object] | None = None
        self._num_cancels_before = 0
        self._is_cancelled = False

    def cancel(self) -> None:
        """Interrupt the task, once."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._num_cancels_before = task.cancelling()
        self._stays[self._request] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        del self._stays[self._request]
        if not self._is_cancelled or task is None:
            return
        # Somebody else may want the end of the task as well: a client that has left, a deadline.
        is_ours = task.uncancel() <= self._num_cancels_before
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise RequestCancelled("the request was cancelled by its id") from error
