"""A short soak: the program runs, disturbs, serves, and finds nothing wrong."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from common.lifecycle.orphan import command_under
from tests.support.source_tree import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.timeout(500)]

MINUTES = 0.4
SEED = 8


async def test_a_short_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    options = ["--minutes", MINUTES, "--round-s", 24, "--clients", 8, "--seed", SEED, "--json", report]
    command = [sys.executable, "-m", "tests.soak", *map(str, options)]
    process = await asyncio.create_subprocess_exec(
        *command_under(os.getpid(), tuple(command)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["is_good"]
    assert found["num_rounds"] == 1
    assert found["faults"]
    assert found["outcomes"]["right answer"] > len(found["right_answers"]) / 2
