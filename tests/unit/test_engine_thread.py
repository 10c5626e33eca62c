"""The engine thread: commands between steps and in order, every event reported, one clean way down and one loud one."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.lifecycle.core_board import CoreBoard
from common.runtime import idle_check
from common.runtime.engine import EngineLoad, EngineThread, StepReport
from common.scheduling.plan import Chunk, StepPlan, StepResult
from tests.support.polling import until
from tests.support.sequences import sequence
from tests.support.valve import Valve

PLAN = StepPlan((Chunk(sequence("a", [1, 2, 3]), 0, 3, samples=True),))


@dataclass
class ScriptedCore:
    """Runs as many steps as it was told to; every call is written down. Commands are numbers of steps, or words."""

    calls: list[str] = field(default_factory=list)
    num_steps_wanted: int = 0
    fails_in: str = ""
    told_by_settling_nothing: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def obey(self, command: int | str) -> Iterable[str]:
        self._note(f"obey {command}")
        if isinstance(command, int):
            self.num_steps_wanted += command
        return (f"obeyed {command}",)

    def plan(self) -> tuple[StepPlan, Iterable[str]]:
        self._note("plan")
        if not self.num_steps_wanted:
            return StepPlan(), ()
        self.num_steps_wanted -= 1
        return PLAN, ("planned",)

    def settle(self, plan: StepPlan, result: StepResult) -> Iterable[str]:
        self._note("settle" if plan else "settle nothing")
        if plan:
            return ("settled",)
        told, self.told_by_settling_nothing = self.told_by_settling_nothing, []
        return told

    def load(self, num_steps: int) -> EngineLoad:
        return EngineLoad(8, 8, 0, num_steps=num_steps)

    def check(self) -> list[str]:
        self._note("check")
        return self.violations

    def _note(self, call: str) -> None:
        assert threading.current_thread().name == "engine"
        if call == self.fails_in:
            raise ZeroDivisionError(call)
        self.calls.append(call)


class ScriptedRunner:
    """Steps begin when the valve lets them."""

    def __init__(self, core: ScriptedCore, valve: Valve) -> None:
        self._core = core
        self._valve = valve

    def run(self, plan: StepPlan) -> StepResult:
        self._valve.enter([])
        self._core.calls.append("run")
        return StepResult({})


class Engine:
    """An engine thread and what it reported."""

    def __init__(self, board: CoreBoard | None = None) -> None:
        self.core = ScriptedCore()
        self.valve = Valve()
        runner = ScriptedRunner(self.core, self.valve)
        self.thread: EngineThread[int | str, str] = EngineThread(self.core, runner, board=board)
        self.reports: list[StepReport[str]] = []
        self.crashes: list[BaseException] = []
        self.thread.start(asyncio.get_running_loop(), self._take, self.crashes.append)

    @property
    def events(self) -> list[str]:
        return [event for report in self.reports for event in report.events]

    async def until_idle(self) -> None:
        await until(lambda: self.core.calls[-1:] == ["check"] and self.thread._commands.empty(), "idle, and checked")

    def _take(self, report: StepReport[str]) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.reports.append(report)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.valve.open()
    await asyncio.to_thread(engine.thread.stop)


async def test_it_tells_its_load_before_it_has_anything_to_do(engine: Engine) -> None:
    await until(lambda: engine.reports, "a report")
    assert engine.reports == [StepReport((), EngineLoad(8, 8, 0))]
    assert engine.core.calls == []


async def test_a_step(engine: Engine) -> None:
    engine.thread.submit(1)
    await until(lambda: "settled" in engine.events, "a step has run")
    await engine.until_idle()
    assert engine.core.calls == ["obey 1", "plan", "run", "settle", "plan", "settle nothing", "check"]
    assert engine.events == ["obeyed 1", "planned", "settled"]
    step = next(report for report in engine.reports if report.num_tokens)
    assert (step.num_tokens, step.load.num_steps) == (3, 1)
    assert step.step_s > 0


async def test_the_board_shows_whether_it_has_anything_to_do(tmp_path: Path) -> None:
    board = CoreBoard(tmp_path / "cores", (0,), ())
    engine = Engine(board)
    await until(lambda: bool(engine.reports) and not board.is_in_use(0), "it waits for commands")
    engine.valve.close()
    engine.thread.submit(1)
    await until(lambda: engine.valve.is_holding, "a step is about to run")
    assert board.is_in_use(0)
    engine.valve.open()
    await engine.until_idle()
    assert not board.is_in_use(0)
    engine.valve.close()
    engine.core.fails_in = "settle"
    engine.thread.submit(1)
    await until(lambda: engine.valve.is_holding, "another step is about to run")
    engine.valve.open()
    await until(lambda: bool(engine.crashes), "it has failed")
    await asyncio.to_thread(engine.thread.stop)
    assert not board.is_in_use(0)


async def test_what_was_planned_is_told_while_the_step_runs(engine: Engine) -> None:
    engine.valve.close()
    engine.thread.submit(1)
    await until(lambda: engine.events == ["obeyed 1", "planned"], "the edge knows")
    await until(lambda: engine.valve.is_holding, "the step runs")
    assert "run" not in engine.core.calls


async def test_commands_are_obeyed_in_order_and_only_between_steps(engine: Engine) -> None:
    engine.valve.close()
    engine.thread.submit(2)
    await until(lambda: engine.valve.is_holding, "the first step runs")
    for command in ("a", "b", "c"):
        engine.thread.submit(command)
    assert "obey a" not in engine.core.calls
    engine.valve.open()
    await until(lambda: engine.events.count("settled") == 2, "both steps have run")
    calls = engine.core.calls
    between = calls[calls.index("settle") + 1 : calls.index("run", calls.index("settle"))]
    assert between == ["obey a", "obey b", "obey c", "plan"]


async def test_what_failed_in_planning_is_told_without_a_step(engine: Engine) -> None:
    engine.core.told_by_settling_nothing = ["failed"]
    engine.thread.submit("go")
    await until(lambda: "failed" in engine.events, "the failure is told")
    await engine.until_idle()
    # It may have made room for others, so it plans again before it sleeps.
    assert engine.core.calls == ["obey go", "plan", "settle nothing", "plan", "settle nothing", "check"]


async def test_an_idle_engine_checks_its_accounts_once_after_its_work(engine: Engine) -> None:
    engine.thread.submit(2)
    await engine.until_idle()
    assert engine.core.calls.count("check") == 1
    assert engine.core.calls[-1] == "check"
    assert all(report.load.num_violations == 0 for report in engine.reports)


async def test_a_busy_engine_checks_nothing(engine: Engine) -> None:
    for _ in range(3):
        engine.valve.close()
        engine.thread.submit(1)
        await until(lambda: engine.valve.is_holding, "a step runs")
        engine.thread.submit(1)
        engine.valve.open()
    await engine.until_idle()
    assert engine.core.calls.count("check") == 1


async def test_a_violation_is_counted_and_logged_each_time(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_check, "INTERVAL_S", 0.0)
    engine.core.violations = ["block 7 is nobody's", "block 8 is everybody's"]
    for number in (1, 2):
        engine.thread.submit(1)
        await until(lambda number=number: engine.reports[-1].load.num_violations == number, "it is counted")
        assert [record.levelname for record in caplog.records] == ["ERROR"] * number
        assert "block 7 is nobody's; block 8 is everybody's" in caplog.records[-1].getMessage()
    assert engine.crashes == []


class TestWhenToCheck:
    def test_only_after_work_and_not_at_once(self) -> None:
        check = idle_check.IdleCheck(list)
        assert check.wait_s(0.0) is None
        check.note_work()
        assert check.wait_s(0.0) == idle_check.IDLE_S
        assert check.run()
        assert check.wait_s(time.monotonic()) is None

    def test_not_again_within_the_interval(self) -> None:
        check = idle_check.IdleCheck(list)
        check.run()
        check.note_work()
        wait_s = check.wait_s(time.monotonic())
        assert wait_s is not None
        assert idle_check.INTERVAL_S - 0.9 < wait_s <= idle_check.INTERVAL_S

    def test_an_expensive_one_is_made_rarely(self) -> None:
        def look_long() -> list[str]:
            started_s = time.monotonic()
            while time.monotonic() < started_s + 0.05:
                pass
            return []

        check = idle_check.IdleCheck(look_long)
        check.run()
        check.note_work()
        assert (check.wait_s(time.monotonic()) or 0.0) > 0.04 / idle_check.SHARE


async def test_stopping_ends_after_the_running_step(engine: Engine) -> None:
    engine.valve.close()
    engine.thread.submit(5)
    await until(lambda: engine.valve.is_holding, "the first step runs")
    stopping = asyncio.create_task(asyncio.to_thread(engine.thread.stop))
    await until(lambda: not engine.thread._commands.empty(), "it has been told")
    engine.valve.open()
    await stopping
    assert engine.core.calls.count("run") == 1
    assert engine.crashes == []
    await asyncio.to_thread(engine.thread.stop)  # again: nothing happens


@pytest.mark.parametrize("call", ["obey 1", "plan", "settle"])
async def test_whatever_raises_ends_it_loudly(engine: Engine, call: str) -> None:
    engine.core.fails_in = call
    engine.thread.submit(1)
    await until(lambda: engine.crashes, "the crash is reported")
    assert isinstance(engine.crashes[0], ZeroDivisionError)
    engine.thread.submit(1)  # nobody obeys any more, nobody minds
    assert len(engine.crashes) == 1


async def test_a_runner_that_raises_ends_it_loudly(engine: Engine) -> None:
    engine.valve.fail(MemoryError())
    engine.thread.submit(1)
    await until(lambda: engine.crashes, "the crash is reported")
    assert isinstance(engine.crashes[0], MemoryError)
    assert "settled" not in engine.events


def test_a_loop_that_is_closed_is_not_called() -> None:
    engine: Engine | None = None

    async def start() -> None:
        nonlocal engine
        engine = Engine()
        engine.valve.close()
        engine.thread.submit(1)
        await until(lambda: engine is not None and engine.valve.is_holding, "the step runs")

    asyncio.run(start())
    assert engine is not None
    engine.valve.open()
    engine.thread.stop()
    assert engine.crashes == []


STUCK_PROCESS = """
import atexit, sys, threading, time
from common.runtime.engine import ENGINE_THREAD
from common.runtime.process import leave

if sys.argv[1] == "stuck":
    stuck = threading.Thread(target=time.sleep, args=(3600,), name=ENGINE_THREAD, daemon=True)
    stuck.start()
    atexit.register(stuck.join)  # as a library that waits for its device
raise SystemExit(leave(int(sys.argv[2])))
"""


@pytest.mark.parametrize("engine", ["stuck", "none"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_step_that_never_returns_does_not_keep_the_process(engine: str, code: int) -> None:
    command = [sys.executable, "-c", STUCK_PROCESS, engine, str(code)]
    assert subprocess.run(command, timeout=60, check=False).returncode == code
