"""The bench of the modes says what was measured, and writes into the documents only what is complete."""

import json
from pathlib import Path

import pytest

from bench.disagg.report import ALWAYS, AUTO, FLAGS, MARKER, NEVER, WORKLOADS, load, rows_of, write_document, write_json
from bench.peers.report import Record

MARKED = f"before\n<!-- {MARKER} -->\nold\n<!-- /{MARKER} -->\nbehind\n"


def record(**goodputs: float) -> Record:
    """Return one round of every rate, with these goodputs by mode."""
    made = Record()
    for workload in WORKLOADS:
        for mode, goodput in goodputs.items():
            made.add(workload, mode, {"goodput_per_s": goodput, "ttft_p50_ms": 100.0})
    return made


def test_every_mode_is_told_to_the_cluster() -> None:
    assert {mode: flags[:2] for mode, flags in FLAGS.items()} == {
        mode: ("--disaggregation", mode) for mode in (AUTO, ALWAYS, NEVER)
    }


@pytest.mark.parametrize(("always", "never", "ratio"), [(0.5, 1.0, "0.8"), (1.6, 1.0, "0.5"), (0.0, 0.0, "-")])
def test_auto_is_compared_with_the_better_of_the_others(always: float, never: float, ratio: str) -> None:
    rows = rows_of(record(auto=0.8, always=always, never=never))
    assert [row[-1] for row in rows[:2]] == [ratio, "-"]
    assert len(rows) == 2 * len(WORKLOADS)


def test_rounds_are_averaged() -> None:
    made = record(auto=1.0, always=1.0, never=1.0)
    made.add(WORKLOADS[0], AUTO, {"goodput_per_s": 0.5})
    assert rows_of(made)[0][1:3] == ["0.75", "1"]


@pytest.mark.parametrize("modes", [(AUTO, ALWAYS), (AUTO, ALWAYS, NEVER)])
def test_the_document_gets_complete_records_alone(tmp_path: Path, modes: tuple[str, ...]) -> None:
    file = tmp_path / "performance.md"
    file.write_text(MARKED)
    is_complete = len(modes) == len(FLAGS)
    assert write_document(record(**dict.fromkeys(modes, 1.0)), file) is is_complete
    assert ("old" in file.read_text()) is not is_complete
    assert ("goodput, requests/s | 1 | 1 | 1 | 1 |" in file.read_text()) is is_complete


def test_pieces_of_one_commit_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "disagg.json"
    assert load(path).rounds == {}
    write_json(path, record(auto=1.0))
    assert load(path).rounds == record(auto=1.0).rounds
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"commit": "another"}))
    assert load(path).rounds == {}
