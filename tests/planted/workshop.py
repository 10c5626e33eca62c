"""Copies of the tree in which bugs are planted, one at a time, and what the tests named by them say."""

import enum
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.planted.plant import Plant, RottenPlant

TEST_TIMEOUT_S = 60
"""For one test: a bug may make it hang, which kills the bug as well."""

RUN_TIMEOUT_S = 600

_LIBRARIES = "kernels/native/lib"

_SOME_FAILED = 1
"""Exit code of pytest; those above mean that the tests did not run as asked."""


class Verdict(enum.StrEnum):
    """What became of a plant."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "broken plant"


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on one plant; `details` say what is wrong with it."""

    plant: Plant
    verdict: Verdict
    duration_s: float
    details: str = ""


class Workshop:
    """One copy of what git knows of a tree, at `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # not deleted in the working tree
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target)
        self._sound_libraries = root / _LIBRARIES
        self._take_sound_libraries()

    def try_out(self, plant: Plant) -> Report:
        """Plant a bug, run its tests, take it out again."""
        started = time.monotonic()
        path = self._folder / plant.file
        sound = path.read_bytes()
        try:
            plant.apply(self._folder)
            if _is_native(plant):
                self._build_libraries()
            verdict, details = self._judge(plant)
        except RottenPlant as error:
            verdict, details = Verdict.BROKEN, str(error)
        finally:
            path.write_bytes(sound)
            if _is_native(plant):
                self._take_sound_libraries()
        return Report(plant, verdict, time.monotonic() - started, details)

    def run(self, tests: Iterable[str]) -> tuple[int, str]:
        """Run tests in this copy; return the exit code and what was said."""
        options = ["-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._folder),
            # Compiled files are found by second and size of their source, which a plant may leave as they are.
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "planted",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        command = [sys.executable, "-m", "pytest", *options, "--hypothesis-seed=0", *tests]
        try:
            done = self._call(command, environment)
        except subprocess.TimeoutExpired:
            return 2, f"the tests took longer than {RUN_TIMEOUT_S} s"
        return done.returncode, done.stdout

    def _call(self, command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._folder,
            env=environment,
            timeout=RUN_TIMEOUT_S,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _build_libraries(self) -> None:
        """Compile what was planted, before the clock of a test runs. Raises `RottenPlant`."""
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        done = self._call([sys.executable, "-m", "kernels.native.compiler"], environment)
        if done.returncode:
            raise RottenPlant(done.stdout)

    def _take_sound_libraries(self) -> None:
        if self._sound_libraries.is_dir():
            shutil.copytree(self._sound_libraries, self._folder / _LIBRARIES, dirs_exist_ok=True)

    def _judge(self, plant: Plant) -> tuple[Verdict, str]:
        code, output = self.run(plant.tests)
        if code > _SOME_FAILED:
            return Verdict.BROKEN, output
        survived = [test for test in plant.tests if not _has_failed(test, output)]
        if survived:
            return Verdict.SURVIVED, "\n".join([f"passes in spite of it: {test}" for test in survived])
        return Verdict.KILLED, ""


def _is_native(plant: Plant) -> bool:
    return plant.file.startswith("kernels/") and plant.file.endswith((".h", ".cpp"))


def _has_failed(test: str, output: str) -> bool:
    """Whether the summary names that test, or one of that file or class, as failed."""
    marks = tuple(f"{word} {test}{end}" for word in ("FAILED", "ERROR") for end in (" ", "[", "::"))
    return any(f"{line} ".startswith(marks) for line in output.splitlines())
