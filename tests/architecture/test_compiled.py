"""What handles every token is compiled in the gateway's image: the compiled modules do what their sources say."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bench.gateway.__main__ import COMPILED
from deploy.compiled import ROOT, install

SUITES = (
    "tests/property/test_streams.py",
    "tests/unit/test_answer.py",
    "tests/unit/test_answer_forms.py",
    "tests/unit/test_choices.py",
    "tests/unit/test_event_stream.py",
    "tests/unit/test_lagging_streams.py",
    "tests/unit/test_outbox.py",
    "tests/unit/test_stream_endings.py",
    "tests/unit/test_stream_logprobs.py",
    "tests/unit/test_streams.py",
    "tests/unit/test_taps.py",
    "tests/unit/test_text_stream.py",
)
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def package() -> Path:
    return install(ROOT / COMPILED)


def run(package: Path, *arguments: str) -> str:
    """Run Python with the compiled package before the checkout's; return what it says."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(LIMIT_S)
def test_everything_listed_is_compiled(package: Path) -> None:
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tandem"]["compiled"][
        "modules"
    ]
    names = run(
        package, "-c", f"import importlib\nfor name in {modules!r}: print(importlib.import_module(name).__file__)"
    )
    assert len(names.split()) == len(modules)
    assert all(name.startswith(f"{package}/") and name.endswith(".so") for name in names.split())


@pytest.mark.timeout(LIMIT_S)
def test_the_compiled_modules_pass_the_tests_of_their_sources(package: Path) -> None:
    said = run(package, "-m", "pytest", "-q", "-o", "pythonpath=", "-p", "no:cacheprovider", *SUITES)
    assert " passed" in said
    assert "skipped" not in said
