"""Keeps the processes of a cluster alive, replaces them, and stops them in the order that lets running requests
finish."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from tandem.cluster.child import MAX_STARTS, Child, ChildRole, ChildSpec
from tandem.cluster.events import Narrator

DRAIN_ORDER = ((ChildRole.GATEWAY,), (ChildRole.PREFILL, ChildRole.DECODE), (ChildRole.REDIS,))
"""Gateways stop accepting and finish their streams while the workers still compute; Redis leaves last."""

LOOK_S = 0.05

UntilReady = Callable[[Child], Awaitable[None]]
"""Returns when the process that a child has now is ready."""


@dataclass(eq=False, slots=True)
class Seat:
    """A child and the task that keeps it."""

    child: Child
    task: "asyncio.Task[None]"


class Supervisor:
    """Owns the children of this process. `log_file_of` names a child's log; `on_change` hears of starts and ends,
    `narrate` of deaths.
    """

    def __init__(self, log_file_of: Callable[[str], Path], on_change: Callable[[], None], narrate: Narrator) -> None:
        self._log_file_of = log_file_of
        self._on_change = on_change
        self._narrate = narrate
        self._seats: list[Seat] = []
        self._beside: list[Seat] = []
        """Processes without a seat: one that leaves while the next has taken it already, or one on trial."""
        self._never = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def children(self) -> list[Child]:
        """Every seat, in the order of their start."""
        return [seat.child for seat in self._seats]

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Start processes and watch them from now on."""
        for spec in specs:
            seat = self._open(spec)
            seat.task.add_done_callback(self._take_failure)
            self._seats.append(seat)

    def settle(self) -> None:
        """The cluster is ready: no number of deaths ends it from now on."""
        for child in self.children:
            child.settle()

    async def replace(self, child: Child, until_ready: UntilReady, timeout_s: float) -> Child:
        """Let `child` finish and leave, start another process in its seat, and return that one when it is ready.

        Two gateways may overlap: there the next one is ready before the last one is asked to leave, and if it is never,
        that one stays. Raises `StartupError` if the new process is not ready within `timeout_s`; in a worker's seat it
        is kept nevertheless. A cancellation leaves everything to `drain`.
        """
        seat = next(seat for seat in self._seats if seat.child is child)
        if child.spec.role is ChildRole.GATEWAY:
            return await self._overlap(seat, until_ready, timeout_s)
        await child.stop(self._never)
        self._take_seat(seat, self._open(child.spec, child.num_lives))
        seat.child.settle()
        await self._prove(seat, until_ready, timeout_s)
        return seat.child

    async def fail(self) -> None:
        """Wait until a child cannot go on, and raise its `StartupError`."""
        await asyncio.shield(self._failure)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop everything in `DRAIN_ORDER`; with `hurry` set, kill instead of waiting."""
        everybody = [*self._seats, *self._beside]
        for roles in DRAIN_ORDER:
            stage = [seat.child for seat in everybody if seat.child.spec.role in roles]
            await asyncio.gather(*(child.stop(hurry) for child in stage))
        await asyncio.gather(*(seat.task for seat in everybody), return_exceptions=True)
        if not self._failure.done():
            self._failure.cancel()

    async def _overlap(self, seat: Seat, until_ready: UntilReady, timeout_s: float) -> Child:
        trial = self._open(seat.child.spec, seat.child.num_lives)
        self._beside.append(trial)
        try:
            await self._prove(trial, until_ready, timeout_s)
        except StartupError:
            await self._dismiss(trial)
            raise
        trial.child.settle()
        leaver = Seat(seat.child, seat.task)
        self._beside[self._beside.index(trial)] = leaver
        self._take_seat(seat, trial)
        await self._dismiss(leaver)
        return seat.child

    async def _dismiss(self, seat: Seat) -> None:
        await seat.child.stop(self._never)
        await asyncio.gather(seat.task, return_exceptions=True)  # what it raised has been told by `_prove`
        self._beside.remove(seat)

    async def _prove(self, seat: Seat, until_ready: UntilReady, timeout_s: float) -> None:
        """Return when the process in the seat is ready; raise `StartupError` if it refuses to start, keeps dying, or
        takes too long.
        """
        name, num_lives = seat.child.spec.name, seat.child.num_lives
        ready = asyncio.ensure_future(until_ready(seat.child))
        try:
            async with asyncio.timeout(timeout_s):
                while not ready.done():
                    await asyncio.wait({ready, seat.task}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    self._check_hope(seat, num_lives)
            await ready
        except TimeoutError:
            logs = self._log_file_of(name)
            raise StartupError(f"{name} does not come back: not ready after {timeout_s:g} s ({logs})") from None
        finally:
            ready.cancel()

    def _check_hope(self, seat: Seat, num_lives_before: int) -> None:
        name = seat.child.spec.name
        if seat.task.done():
            seat.task.result()  # raises why it was given up
            raise StartupError(f"{name} was stopped")
        if seat.child.refusal:
            raise StartupError(f"{name} does not come back: {seat.child.refusal}")
        if seat.child.num_lives - num_lives_before > MAX_STARTS:
            raise StartupError(f"{name} does not come back: it keeps dying ({self._log_file_of(name)})")

    def _open(self, spec: ChildSpec, num_lives_before: int = 0) -> Seat:
        child = Child(
            spec, self._log_file_of(spec.name), self._on_change, self._narrate, num_lives_before=num_lives_before
        )
        return Seat(child, asyncio.create_task(child.keep(), name=f"keep {spec.name}"))

    def _take_seat(self, seat: Seat, successor: Seat) -> None:
        seat.child, seat.task = successor.child, successor.task
        seat.task.add_done_callback(self._take_failure)
        self._on_change()

    def _take_failure(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or self._failure.done():
            return
        error = task.exception()
        if error is not None:
            self._failure.set_exception(error)
            self._failure.exception()  # heard: nobody may be waiting for it any more
