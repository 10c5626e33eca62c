"""Runs Spin over the protocol's models: each configuration must hold, and each removed rule must break it.

The list of configurations is `configurations.toml`. A run counts only if Spin searched all of it: one that was cut off
by depth, memory or time has shown nothing, and fails. What is built lies in a temporary folder.
"""

import argparse
import bisect
import enum
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

FOLDER = Path(__file__).resolve().parent
CONFIGURATIONS = FOLDER / "configurations.toml"
TOOLS_NEEDED = "spin and gcc are needed: apt-get install spin gcc"

MAX_DEPTH = 1_000_000
"""Steps of one run. The longest ones have a few hundred."""

CUT_OFF = (
    ("max search depth too small", "depth limit"),
    ("out of memory", "memory limit"),
    ("exceeds memory limit", "memory limit"),
    ("-DMEMLIM", "memory limit"),
    ("Search not completed", "not completed"),
    ("VECTORSZ", "state vector too large"),
)
"""What a search says that was not exhaustive."""


MODEL_ERROR = "invalid array index"
"""What Spin also calls a violated assertion, but is a mistake in the model."""


class Expectation(enum.StrEnum):
    """What a configuration must show."""

    HOLDS = "holds"
    """No property is violated in any run."""
    NO_CYCLE = "no cycle"
    """And no run goes on for ever without progress."""
    BREAKS = "breaks"
    """One rule is removed, and an assertion is violated."""


class Verdict(enum.StrEnum):
    """What a run has shown."""

    HOLDS = "holds"
    VIOLATED = "violated"
    CUT_OFF = "cut off"
    BROKEN = "did not run"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run of one model. `switches` are preprocessor definitions; `removes` is the rule that is left out."""

    model: str
    section: str
    key: str
    switches: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return f"{self.model}/{self.key}"

    @property
    def removes(self) -> str | None:
        """The switch that removes a rule, if it is about one."""
        return self.key.partition(":")[0] if self.section in ("removals", "slow-removals") else None

    @property
    def is_quick(self) -> bool:
        """Whether it takes seconds."""
        return self.section in ("quick", "removals")

    @property
    def expectation(self) -> Expectation:
        """What it must show."""
        match self.section:
            case "removals" | "slow-removals":
                return Expectation.BREAKS
            case "cycles":
                return Expectation.NO_CYCLE
            case "quick" | "full":
                return Expectation.HOLDS
            case _:
                raise ValueError(f"{CONFIGURATIONS.name}: no such section: {self.model}.{self.section}")

    @property
    def definitions(self) -> list[str]:
        """All switches as arguments of Spin."""
        removal = [] if self.removes is None else [f"-D{self.removes}"]
        return removal + [f"-D{switch}" for switch in self.switches]

    @property
    def memory_mb(self) -> int:
        """More than this makes it cut off."""
        return 3_000 if self.is_quick else 9_000

    @property
    def cpu_s(self) -> int:
        """Longer than this makes it cut off."""
        return 120 if self.is_quick else 1_800


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a configuration. `cpu_s` includes generating and compiling the verifier."""

    configuration: Configuration
    verdict: Verdict
    num_states: int
    cpu_s: float
    details: str

    @property
    def is_expected(self) -> bool:
        """Whether the run has shown what it must."""
        match self.configuration.expectation:
            case Expectation.BREAKS:
                return self.verdict is Verdict.VIOLATED
            case Expectation.HOLDS | Expectation.NO_CYCLE:
                return self.verdict is Verdict.HOLDS
            case _:
                assert_never(self.configuration.expectation)


def main() -> int:
    """Check the models; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="only the configurations that take seconds")
    parser.add_argument("--only", metavar="NAME", action="append", help="this configuration; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (default: 2)")
    parser.add_argument("--trail", metavar="NAME", help="print the shortest violation found, an event a line")
    parser.add_argument("--list", action="store_true", help="print the configurations and run none")
    arguments = parser.parse_args()
    if shutil.which("spin") is None or shutil.which("gcc") is None:
        sys.stderr.write(f"{TOOLS_NEEDED}\n")
        return 1
    try:
        if arguments.trail:
            return _show_trail(_named([arguments.trail])[0])
        chosen = _named(arguments.only) if arguments.only else load_configurations()
    except LookupError as error:
        parser.error(str(error))
    if arguments.quick:
        chosen = [configuration for configuration in chosen if configuration.is_quick]
    if arguments.list:
        _write(*map(_row, chosen))
        return 0
    return _check(chosen, arguments.jobs)


def load_configurations() -> list[Configuration]:
    """Return the list, in the order of the file."""
    models = tomllib.loads(CONFIGURATIONS.read_text(encoding="utf-8"))
    return [
        Configuration(model, section, key, tuple(switches.split()))
        for model, sections in models.items()
        for section, runs in sections.items()
        for key, switches in runs.items()
    ]


def _named(names: Iterable[str]) -> list[Configuration]:
    by_name = {configuration.name: configuration for configuration in load_configurations()}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise LookupError(f"no such configuration: {', '.join(unknown)}")
    return [by_name[name] for name in names]


def _check(chosen: Sequence[Configuration], num_jobs: int) -> int:
    _write(f"{'configuration':37} {'switches':80} {'states':>11} {'CPU s':>7}  verdict")
    with ThreadPoolExecutor(num_jobs) as pool:
        outcomes: list[Outcome] = []
        for outcome in pool.map(_run, chosen):
            outcomes.append(outcome)
            _write(_result_row(outcome))
    wrong = [outcome for outcome in outcomes if not outcome.is_expected]
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    _write(f"{len(outcomes) - len(wrong)} of {len(outcomes)} configurations are as they must be ({cpu_s:.0f} s of CPU)")
    for outcome in wrong:
        _write(f"{outcome.configuration.name} must: {outcome.configuration.expectation}; {_explain(outcome)}")
    return 1 if wrong else 0


def _explain(outcome: Outcome) -> str:
    return f"{outcome.verdict}" + (f" ({outcome.details})" if outcome.details else "")


def _row(configuration: Configuration) -> str:
    switches = " ".join(configuration.definitions).replace("-D", "")
    return f"{configuration.name:37} {switches:80}"


def _result_row(outcome: Outcome) -> str:
    shown = outcome.verdict if outcome.is_expected else f"{_explain(outcome)}  <-- WRONG"
    return f"{_row(outcome.configuration)} {outcome.num_states:>11,} {outcome.cpu_s:>7.1f}  {shown}"


def _run(configuration: Configuration) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        workshop = _Workshop(configuration, Path(folder))
        return workshop.run()


def _show_trail(configuration: Configuration) -> int:
    """Print the events of a short counterexample; 1 if there is none."""
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        workshop = _Workshop(configuration, Path(folder))
        outcome = workshop.run("-i")
        _write(_result_row(outcome))
        if outcome.verdict is not Verdict.VIOLATED:
            return 1
        _write(*workshop.trail())
        return 0


class _Workshop:
    """Generates, compiles and runs the verifier of one configuration in a folder of its own."""

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        self._configuration = configuration
        self._folder = folder
        self._model = FOLDER / f"{configuration.model}.pml"
        self._cpu_s = 0.0

    def run(self, *options: str) -> Outcome:
        """Search all runs; more `options` go to the verifier."""
        configuration = self._configuration
        code, text = self._call(["spin", "-a", *configuration.definitions, str(self._model)])
        if code:
            return self._outcome(Verdict.BROKEN, _first_line(text))
        code, text = self._call(["gcc", *self._compiler_options("-i" in options), "-o", "pan", "pan.c"])
        if code:
            return self._outcome(Verdict.BROKEN, _first_line(text))
        cycles = ["-l"] if configuration.expectation is Expectation.NO_CYCLE else []
        # The limit is of CPU time, so that a busy machine changes no verdict.
        limited = f'ulimit -t {configuration.cpu_s}; exec ./pan "$@"'
        code, text = self._call(["sh", "-c", limited, "pan", f"-m{MAX_DEPTH}", *cycles, *options])
        verdict, details = judge(configuration.expectation, code, text)
        return self._outcome(verdict, details, text)

    def trail(self) -> list[str]:
        """Return the counterexample that the last run has left, one line per event."""
        replay = ["spin", "-k", f"{self._model.name}.trail", "-p", *self._configuration.definitions, str(self._model)]
        code, text = self._call(replay)
        return [text] if code else _events(self._model.read_text(encoding="utf-8"), text)

    def _compiler_options(self, seeks_shortest: bool) -> list[str]:
        kind = ["-DNP", "-DNOFAIR"] if self._configuration.expectation is Expectation.NO_CYCLE else ["-DSAFETY"]
        reach = ["-DREACH"] if seeks_shortest else []
        memory = f"-DMEMLIM={self._configuration.memory_mb}"
        # -O1: for most configurations compiling takes longer than running.
        return ["-O1" if self._configuration.is_quick else "-O2", "-w", "-DVECTORSZ=2048", memory, *kind, *reach]

    def _outcome(self, verdict: Verdict, details: str, text: str = "") -> Outcome:
        states = re.search(r"([\d.e+]+) states, stored", text)
        return Outcome(self._configuration, verdict, int(float(states[1])) if states else 0, self._cpu_s, details)

    def _call(self, command: Sequence[str]) -> tuple[int, str]:
        """Run a command to its end; returns its status (negative: the signal that ended it) and all that it said."""
        with (self._folder / "output").open("w+b") as output:
            process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)  # reaped above, for its CPU time
            self._cpu_s += usage.ru_utime + usage.ru_stime
            output.seek(0)
            return process.returncode, output.read().decode(errors="replace")


def judge(expectation: Expectation, code: int, text: str) -> tuple[Verdict, str]:
    """Return what a verifier that ended with `code` and said `text` has shown, and what there is to say about it.

    A violation counts even if the rest of the search was not done; that there is none only if all of it was.
    """
    violation = re.search(
        r"pan:1: (assertion violated .*?|non-progress cycle|invalid end state)(?: \(at depth|$)", text, re.MULTILINE
    )
    if violation is not None:
        is_assertion = violation[1].startswith("assertion") and MODEL_ERROR not in violation[1]
        is_property = is_assertion or expectation is not Expectation.BREAKS
        return (Verdict.VIOLATED if is_property else Verdict.BROKEN), violation[1]
    for sign, reason in CUT_OFF:
        if sign in text:
            return Verdict.CUT_OFF, reason
    if code:
        return Verdict.CUT_OFF, f"ended with status {code} before the search was over"
    if "errors: 0" in text:
        return Verdict.HOLDS, ""
    return Verdict.BROKEN, _first_line(text)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "it said nothing")


def _events(model: str, replay: str) -> list[str]:
    """Shorten Spin's replay to one line per event: its step, its name in the model, and what it changed."""
    starts = [(number, match[1]) for number, line in enumerate(model.splitlines(), 1) if (match := _INLINE.match(line))]
    events: dict[str, list[str]] = {}
    for match in _ACTION.finditer(replay):
        step, line, action, error = match.groups()
        if error:
            events.setdefault("***", []).append(error)
            continue
        if step not in events:
            index = bisect.bisect(starts, (int(line), "~")) - 1
            events[step] = [f"{starts[index][1] if index >= 0 else '-':24}"]
        if _CHANGE.match(action):
            events[step].append(action)
    return [f"{step:>4} {'  '.join(actions)}" for step, actions in events.items()]


_INLINE = re.compile(r"(?:inline|active proctype) (\w+)\(")
_ACTION = re.compile(
    r"^\s*(\d+):\s+proc .*?:(\d+) [^\[]*\[(.*)\]\s*$|^spin: .*Error: (assertion violated.*)$", re.MULTILINE
)
_CHANGE = re.compile(r"(?![a-j] = |assert|\()[\w\[\]()+*/ -]+( = |[!?])")
"""An assignment to anything but scratch, or a message."""


def _write(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
