"""Who may be served now: a bound on the requests in progress, the limits of each tenant, and an orderly end of all.

Owned by the gateway's event loop. The bound is this process's own; a tenant's limits count over all gateways and are
asked for in Redis, by requests of tenants that have some and by no others. Both are taken before the prompt is
tokenised, by an estimate, and released exactly once, however the request ends. A request for n choices counts as n.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from common.errors import Draining, InvalidRequest, Overloaded
from gateway.claims import Claim
from gateway.metering import Metered, Metering, Unmetered
from gateway.tenant_permits import TenantPermits

SMOOTHING = 0.1
"""Weight of the newest request in the average duration; about the last ten count."""

MAX_RETRY_AFTER_S = 60.0


class Permit:
    """The right to be in progress, released exactly once when the `with` block is left, however that happens."""

    def __init__(self, admission: "Admission", num_choices: int) -> None:
        self._admission = admission
        self.num_choices = num_choices
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
    """Gives out permits. `tenants` None: no tenant has limits."""

    def __init__(
        self,
        max_concurrent: int,
        tenants: TenantPermits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._tenants = tenants
        self._clock = clock
        self._started: dict[Permit, float] = {}
        self._mean_duration_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        """This process leaves: it is not ready, but serves what still arrives on the connections that are open."""
        self._is_over = False
        self.num_running = 0
        """Choices in progress; a request has one unless it asks for more."""

    def reserve(self, claim: Claim) -> "Reservation":
        """Return what holds the place of a request while entered: here, and within the limits of its tenant."""
        return Reservation(self, self._tenants, claim)

    def admit(self, num_choices: int = 1) -> Permit:
        """Return a permit of this process; raises `Draining` or, with the time until one is free, `Overloaded`."""
        if self._is_over:
            raise Draining("The server is shutting down.", retry_after_s=1.0)
        if num_choices > self._max_concurrent:
            raise InvalidRequest(f"`n` is {num_choices}; the server takes at most {self._max_concurrent}.", param="n")
        if self.num_running + num_choices > self._max_concurrent:
            raise Overloaded(
                f"The server already works on {self.num_running} answers.", retry_after_s=self.retry_after_s()
            )
        permit = Permit(self, num_choices)
        self._started[permit] = self._clock()
        self.num_running += num_choices
        self._idle.clear()
        return permit

    def release(self, permit: Permit) -> None:
        """Take a permit back; a second time does nothing."""
        started = self._started.pop(permit, None)
        if started is None:
            return
        self.num_running -= permit.num_choices
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

    def retry_after_s(self) -> float:
        """Return how long it takes, at the rate of late, until one of the running requests is done."""
        return min(max(self._mean_duration_s / self._max_concurrent, 1.0), MAX_RETRY_AFTER_S)


class Reservation:
    """The place of one request.

    Entering raises `Draining`, `Overloaded`, `RateLimited` or `BrokerUnavailable`; then nothing is held and nothing
    charged. A class, as are the other blocks around every request: a generator costs each of them 5 us.
    """

    def __init__(self, admission: Admission, tenants: TenantPermits | None, claim: Claim) -> None:
        self._admission = admission
        self._tenants = tenants
        self._claim = claim
        self._permit: Permit
        self._metered: Metered | None = None

    async def __aenter__(self) -> Metering:
        claim, permit = self._claim, self._admission.admit(self._claim.num_choices)
        self._permit = permit.__enter__()
        if self._tenants is None or claim.caller.limits.is_unlimited:
            return Unmetered(claim.caller)
        metered = Metered(self._tenants, claim, self._admission.retry_after_s)
        try:
            await metered.__aenter__()
        except BaseException as error:
            permit.__exit__(type(error), error, error.__traceback__)
            raise
        self._metered = metered
        return metered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._metered is not None:
                await self._metered.__aexit__(kind, error, trace)
        finally:
            self._permit.__exit__(kind, error, trace)
