"""Keeps the processes of a cluster alive, and stops them in the order that lets running requests finish."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from tandem.cluster.child import Child, ChildRole, ChildSpec
from tandem.cluster.events import Narrator

DRAIN_ORDER = ((ChildRole.GATEWAY,), (ChildRole.PREFILL, ChildRole.DECODE), (ChildRole.REDIS,))
"""Gateways stop accepting and finish their streams while the workers still compute; Redis leaves last."""


class Supervisor:
    """Owns the children of this process. `log_file_of` names a child's log; `on_change` hears of starts and ends,
    `narrate` of deaths.
    """

    def __init__(self, log_file_of: Callable[[str], Path], on_change: Callable[[], None], narrate: Narrator) -> None:
        self._log_file_of = log_file_of
        self._on_change = on_change
        self._narrate = narrate
        self._seats: list[tuple[Child, asyncio.Task[None]]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def children(self) -> list[Child]:
        """Every seat, in the order of their start."""
        return [child for child, _ in self._seats]

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Start processes and watch them from now on."""
        for spec in specs:
            child = Child(spec, self._log_file_of(spec.name), self._on_change, self._narrate)
            task = asyncio.create_task(child.keep(), name=f"keep {spec.name}")
            task.add_done_callback(self._take_failure)
            self._seats.append((child, task))

    def settle(self) -> None:
        """The cluster is ready: no number of deaths ends it from now on."""
        for child, _ in self._seats:
            child.settle()

    async def fail(self) -> None:
        """Wait until a child cannot go on, and raise its `StartupError`."""
        await asyncio.shield(self._failure)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Stop everything in `DRAIN_ORDER`; with `hurry` set, kill instead of waiting."""
        for roles in DRAIN_ORDER:
            stage = [child for child, _ in self._seats if child.spec.role in roles]
            await asyncio.gather(*(child.stop(hurry) for child in stage))
        await asyncio.gather(*(task for _, task in self._seats), return_exceptions=True)
        if not self._failure.done():
            self._failure.cancel()

    def _take_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._failure.done():
            return
        error = task.exception()
        if error is not None:
            self._failure.set_exception(error)
            self._failure.exception()  # heard: nobody may be waiting for it any more
