"""The list of planted bugs stays alive: each still finds its text in the source, and the tests that must kill it.

Whether they do kill it takes minutes: `make planted-bugs`.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.planted.catalogue import PLANTS
from tests.planted.plant import Plant
from tests.support.source_tree import ROOT

SUITES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "property").glob("test_*.py"))
RULES = ROOT / "docs" / "protocol" / "README.md"
ROW = re.compile(r"^\| `(?P<switch>[A-Z_]+)` \|.*\| (?P<guards>[^|]+) \|$", re.MULTILINE)
OPEN = {"not built", "not kept yet"}
"""What the table of the protocol's rules says of a rule that the code does not have."""


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(plant.name for plant in PLANTS).items() if count > 1] == []


def test_every_rule_of_the_models_is_planted() -> None:
    names = {plant.name for plant in PLANTS}
    rows = {row["switch"]: row["guards"] for row in ROW.finditer(RULES.read_text(encoding="utf-8"))}
    assert len(rows) > 30, "the table is not found"
    guards = {switch: set(re.findall(r"`([^`]+)`", told)) for switch, told in rows.items() if told not in OPEN}
    assert {switch: told - names for switch, told in guards.items() if not told or told - names} == {}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_its_text_is_still_there(plant: Plant) -> None:
    source = (ROOT / plant.file).read_text(encoding="utf-8")
    planted = plant.planted(source)
    assert planted != source
    if plant.file.endswith(".py"):
        ast.parse(planted)
    assert re.fullmatch(r"[A-Z][^\n]*\.", plant.rule)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_its_tests_are_still_there(plant: Plant) -> None:
    assert plant.tests
    assert [test for test in plant.tests if not _exists(test)] == []


@pytest.mark.parametrize("suite", SUITES)
def test_a_property_suite_names_what_it_kills(suite: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / suite).read_bytes())) or ""
    killed = sorted(plant.name for plant in PLANTS if suite in plant.tests)
    told = re.search(r"Kills the planted bugs? ([^.]*)\.", docstring)
    named = sorted(re.split(r", | and |,\n", " ".join(told.group(1).split()))) if told else []
    assert named == killed


def _exists(test: str) -> bool:
    """Whether a node id names a file, class or function."""
    path, *names = test.split("::")
    if not Path(ROOT / path).is_file():
        return False
    body: list[ast.stmt] = ast.parse((ROOT / path).read_bytes()).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True
