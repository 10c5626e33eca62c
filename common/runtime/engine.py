"""The engine thread of a worker: the only thread that touches its pool, its scheduler and its tensors.

The asyncio edge talks to it by two queues: commands in, reports out. One step:

    obey(commands) -> plan -> run -> settle

When it has nothing to do it checks the accounts of its blocks, now and then.
"""

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.lifecycle.core_board import CoreBoard
from common.lifecycle.precedence import let_others_go_first
from common.messages.registry import StepCost
from common.runtime.idle_check import IdleCheck
from common.scheduling.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
_CommandT_contra = TypeVar("_CommandT_contra", contravariant=True)
_EventT_co = TypeVar("_EventT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full the engine is, as of the end of a step (fields as in `WorkerLoad`).

    `num_preemptions`, `num_cancelled_chunks` and `num_violations` count since the engine began.
    """

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    num_steps: int = 0
    absorbed: str | None = None
    num_preemptions: int = 0
    num_quarantined: int = 0
    is_exclusive: bool = False
    num_cancelled_chunks: int = 0
    num_violations: int = 0
    num_uncomputed: int = 0
    step_cost: StepCost | None = None


@dataclass(frozen=True, slots=True)
class StepReport(Generic[EventT]):
    """What happened since the last report. `step_s` and the counts of tokens are 0 when no step ran."""

    events: tuple[EventT, ...]
    load: EngineLoad
    step_s: float = 0.0
    num_tokens: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an engine thread is: whether it has something to do, and how often it has completed something so far."""

    is_busy: bool
    num_completed: int


class Core(Protocol[_CommandT_contra, _EventT_co]):
    """The policy that an engine thread drives; never called from another thread."""

    def obey(self, command: _CommandT_contra) -> Iterable[_EventT_co]:
        """Change state as told; return what the edge must know."""

    def plan(self) -> tuple[StepPlan, Iterable[_EventT_co]]:
        """Decide the next step; empty when there is nothing to compute."""

    def settle(self, plan: StepPlan, result: StepResult) -> Iterable[_EventT_co]:
        """Take in what a step computed; called for an empty plan, too."""

    def load(self, num_steps: int) -> EngineLoad:
        """Return how full the engine is; the thread adds `num_violations`."""

    def check(self) -> list[str]:
        """Return what is wrong with the accounts of the blocks, one text each; called when the engine is idle."""


class Runner(Protocol):
    """Computes a plan."""

    def run(self, plan: StepPlan) -> StepResult:
        """Return the sampled tokens."""


ENGINE_THREAD = "engine"
"""Name of the thread."""

_NOTHING = StepResult(tokens={})


def _nothing() -> None:
    """Begin without further ado."""


class EngineThread(Generic[CommandT, EventT]):
    """Runs a core until stopped. Commands are obeyed between steps, in order.

    Reports arrive on the loop that called `start`. If a step raises, `on_crash` is called there and the thread ends:
    what the device holds then is unknown, so the process should leave.

    The thread begins with `warm_up`; the first report comes behind that.

    By `niceness` it lets others go first that want its core, its process's own event loop among them; so do the threads
    that a step is spread over, as they are started by its first one. The `board` is told whether it has anything to do.
    """

    def __init__(
        self,
        core: Core[CommandT, EventT],
        runner: Runner,
        niceness: int = 0,
        warm_up: Callable[[], None] = _nothing,
        board: CoreBoard | None = None,
    ) -> None:
        self._core = core
        self._runner = runner
        self._niceness = niceness
        self._warm_up = warm_up
        self._board = board
        self._commands: queue.SimpleQueue[CommandT | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_steps = 0
        self._idle_check = IdleCheck(core.check)
        self._is_stopping = False
        self._is_waiting = True
        """For commands: it has nothing else to do."""
        self._num_completed = 0
        """Rounds of commands obeyed, and steps."""

    @property
    def progress(self) -> Progress:
        """How far the thread is; readable from any thread."""
        return Progress(not self._is_waiting or not self._commands.empty(), self._num_completed)

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport[EventT]], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        """Start the thread; both callbacks run on `loop`."""

        def work() -> None:
            let_others_go_first(self._niceness)
            try:
                if self._board is not None:
                    self._board.occupy()
                self._warm_up()
                self._work(lambda report: _call_soon(loop, on_report, report))
            except BaseException as error:  # root of a thread: handed to the loop
                logger.exception("the engine thread failed")
                _call_soon(loop, on_crash, error)
            finally:
                if self._board is not None:
                    self._board.vacate()

        self._thread = threading.Thread(target=work, name=ENGINE_THREAD, daemon=True)
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Queue a command; callable from any thread."""
        self._commands.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the running step; blocks up to `timeout_s`, then leaves it to itself."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self, report: Callable[[StepReport[EventT]], None]) -> None:
        is_idle = True
        report(StepReport((), self._load()))
        while True:
            events = self._obey(report, wait=is_idle)
            if self._is_stopping:
                return
            self._num_completed += 1
            self._idle_check.note_work()
            plan, planned = self._core.plan()
            events.extend(planned)
            if not plan:
                settled = list(self._core.settle(plan, _NOTHING))
                is_idle = not settled  # what has failed in planning may have made room
                report(StepReport((*events, *settled), self._load()))
                continue
            is_idle = False
            if events:  # the edge may act on them while the step runs
                report(StepReport(tuple(events), self._load()))
            report(self._step(plan))

    def _load(self) -> EngineLoad:
        load = self._core.load(self._num_steps)
        return dataclasses.replace(load, num_violations=self._idle_check.num_violations)

    def _obey(self, report: Callable[[StepReport[EventT]], None], *, wait: bool) -> list[EventT]:
        events: list[EventT] = []
        if wait:
            self._take(self._await_command(report), events)
        while not self._commands.empty():
            self._take(self._commands.get(), events)
        return events

    def _await_command(self, report: Callable[[StepReport[EventT]], None]) -> CommandT | None:
        """Wait for the next command; if it does not come soon, check the accounts meanwhile."""
        self._is_waiting = True
        if self._board is not None:
            self._board.vacate()
        try:
            return self._commands.get(timeout=self._idle_check.wait_s(time.monotonic()))
        except queue.Empty:
            if not self._idle_check.run():
                report(StepReport((), self._load()))
            return self._commands.get()
        finally:
            self._is_waiting = False
            if self._board is not None:
                self._board.occupy()

    def _take(self, command: CommandT | None, events: list[EventT]) -> None:
        if command is None:
            self._is_stopping = True
        else:
            events.extend(self._core.obey(command))

    def _step(self, plan: StepPlan) -> StepReport[EventT]:
        started = time.perf_counter()
        result = self._runner.run(plan)
        result = dataclasses.replace(result, run_s=time.perf_counter() - started)
        events = tuple(self._core.settle(plan, result))
        self._num_steps += 1
        self._num_completed += 1
        load = self._load()
        step_s = time.perf_counter() - started
        return StepReport(events, load, step_s, plan.num_tokens, plan.num_prompt_tokens)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *arguments)
