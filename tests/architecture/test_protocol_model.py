"""Every rule of the protocol's models can be removed, is listed, is run without, and is told about; nothing else is.
A run that was cut off has shown nothing.

Needs no Spin: it reads the models, the list of their runs and the table in their README.
"""

import re
from collections import defaultdict

import pytest

from docs.protocol.check import Configuration, Expectation, Verdict, judge, load_configurations
from tests.support.source_tree import ROOT

FOLDER = ROOT / "docs" / "protocol"
MODELS = sorted(path.stem for path in FOLDER.glob("*.pml"))
RUNS = load_configurations()


def _model(name: str) -> str:
    return (FOLDER / f"{name}.pml").read_text(encoding="utf-8")


def _switches(model: str) -> set[str]:
    """Names that the model looks at and does not define itself: without them every rule is there."""
    looked_at = set(re.findall(r"^#ifn?def (\w+)", _model(model), re.MULTILINE))
    return looked_at - set(re.findall(r"^#define (\w+)", _model(model), re.MULTILINE))


def _documented() -> dict[str, set[str]]:
    """Models by switch, from the table of rules."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([^|]*) \|", readme, re.MULTILINE)
    return {switch: set(models.split(", ")) for switch, models in rows}


def _removed() -> dict[str, set[str]]:
    """Models by the switch that some run removes there."""
    removed = defaultdict(set)
    for run in RUNS:
        if run.removes is not None:
            removed[run.removes].add(run.model)
    return removed


def test_the_models_are_found() -> None:
    assert "handover" in MODELS
    assert "NO_GEN" in _switches("handover")


@pytest.mark.parametrize("model", MODELS)
def test_every_switch_is_run(model: str) -> None:
    assert _switches(model) == {switch for switch, models in _removed().items() if model in models}


def test_every_switch_is_documented_with_its_models() -> None:
    assert _documented() == _removed()


@pytest.mark.parametrize("model", MODELS)
def test_each_model_holds_in_some_quick_run(model: str) -> None:
    assert any(run.model == model and run.is_quick and run.expectation is Expectation.HOLDS for run in RUNS)


def test_runs_are_of_models_that_are_there() -> None:
    assert {run.model for run in RUNS} == set(MODELS)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_sets_what_its_model_knows(run: Configuration) -> None:
    known = set(re.findall(r"^#ifn?def (\w+)", _model(run.model), re.MULTILINE))
    assert {definition.removeprefix("-D").partition("=")[0] for definition in run.definitions} <= known


def test_names_of_runs_are_unique() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)


COMPLETE = "(Spin Version 6.5.2)\nState-vector 52 byte, depth reached 38, errors: 0\n   221438 states, stored\n"
VIOLATION = (
    "pan:1: assertion violated (d_state<=3) (at depth 21)\npan: wrote link.pml.trail\nWarning: Search not completed\n"
)


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, COMPLETE, Verdict.HOLDS),
        (0, VIOLATION, Verdict.VIOLATED),
        (0, f"error: max search depth too small\n{COMPLETE}", Verdict.CUT_OFF),
        (0, f"pan: reached -DMEMLIM bound\n{COMPLETE}", Verdict.CUT_OFF),
        (0, f"Warning: Search not completed\n{COMPLETE}", Verdict.CUT_OFF),
        (-9, "Depth= 70 States= 1e+06\n", Verdict.CUT_OFF),
        (-9, COMPLETE, Verdict.CUT_OFF),
        (0, "", Verdict.BROKEN),
    ],
)
def test_only_a_complete_search_holds(code: int, text: str, verdict: Verdict) -> None:
    assert judge(Expectation.HOLDS, code, text)[0] is verdict


@pytest.mark.parametrize("text", ["assertion violated - invalid array index", "invalid end state"])
def test_a_mistake_in_the_model_breaks_no_rule(text: str) -> None:
    assert judge(Expectation.BREAKS, 0, f"pan:1: {text} (at depth 21)\n")[0] is Verdict.BROKEN
