"""Rules that every source file keeps and no linter knows."""

import ast
from pathlib import Path

import pytest

from tests.support.source_tree import OTHER_FOLDERS, PACKAGES, ROOT, python_files

MAX_LINES = 400
FILES = python_files(*PACKAGES, *OTHER_FOLDERS)


def test_the_tree_is_found() -> None:
    assert ROOT / "common" / "errors.py" in FILES


def test_every_module_says_what_it_owns() -> None:
    mute = [
        _name(path) for path in FILES if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_bytes()))
    ]
    assert mute == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_kernels_package_stays_empty() -> None:
    # transformers looks at a top-level package of this name: anything in it could be taken for the other one.
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize("stem", ["utils", "helpers", "util", "helper", "misc"])
def test_no_drawer_files(stem: str) -> None:
    assert [_name(path) for path in FILES if path.stem == stem or stem in path.parent.parts] == []


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
