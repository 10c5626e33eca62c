"""What README and the documents name exists: targets of make, files, metrics."""

import re
from pathlib import Path

import pytest

from tests.support.source_tree import PACKAGES, ROOT, python_files

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def _code(document: Path) -> str:
    """Return what stands in blocks and between backticks."""
    text = document.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL))


@each_document
def test_targets_of_make_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"test-{path.name}" for path in (ROOT / "tests").iterdir()}  # make test-%
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", _code(document))) <= targets


@each_document
def test_files_exist(document: Path) -> None:
    names = re.findall(r"`((?:[a-z_]+/)+[\w.-]*)`", document.read_text(encoding="utf-8"))
    assert [name for name in names if not ((ROOT / name).exists() or (ROOT / f"{name}.py").exists())] == []


@each_document
def test_metrics_exist(document: Path) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in python_files(*PACKAGES))
    metrics = set(re.findall(r"\btandem_[a-z_]+", _code(document))) - {"tandem_"}
    assert [name for name in metrics if f'"{name.removesuffix("_total")}"' not in source] == []
