"""The gateway's bench, tiny: a real gateway, a real Redis, and every token read once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.redis]

TIMEOUT_S = 300
"""Six seconds on a quiet machine."""


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_it_runs_and_counts(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.gateway", "--quick", "--json", str(written)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "events/s" in ended.stdout.splitlines()[0]
    figures = json.loads(written.read_text())["targets"]
    assert figures.keys() == {"no router", "tandem"}
    for target in figures.values():
        assert target.keys() == {"fast", "paced", "lone", "short", "breaks"}
        assert target["fast"][0]["tokens_per_s"] > 0
    (broken,) = figures["tandem"]["breaks"]
    assert broken["error_events"] == 1
    assert broken["notice_ms"] < 1000
