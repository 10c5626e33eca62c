"""Every test belongs to the default run or to a target of its own: none lies where nobody runs it."""

import tomllib

from tests.support.source_tree import ROOT

OWN_TARGET = {"faults": "test-faults"}
"""Folders that the default run leaves out, and the target of the Makefile that runs them."""


def test_no_folder_of_tests_is_forgotten() -> None:
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    default = {path.removeprefix("tests/") for path in config["tool"]["pytest"]["ini_options"]["testpaths"]}
    assert folders == default | OWN_TARGET.keys()


def test_ci_runs_what_the_default_run_leaves_out() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for folder, target in OWN_TARGET.items():
        assert f"\n{target}: " in makefile
        assert f"tests/{folder}\n" in makefile
        assert f"make --no-print-directory {target} " in ci
