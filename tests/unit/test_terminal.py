"""What is printed besides answers: commands that work where they are read, and a warning of open ports."""

import sys
from pathlib import Path

import pytest

from tandem.cluster.events import Ready
from tandem.cluster.ports import is_loopback
from tandem.cluster.terminal import TerminalNarrator, greeting
from tandem.invocation import invocation


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (".venv/bin/tandem", ".venv/bin/tandem"),
        ("/my venv/bin/tandem", "'/my venv/bin/tandem'"),
        ("/work/tandem/__main__.py", "tandem"),
        ("tandem", "tandem"),
    ],
)
def test_suggested_commands_are_called_as_we_were(program: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert invocation() == expected
    shown = greeting(Ready("http://x", "m", "/state"), is_detached=False)
    assert f"  chat    {expected} chat --url http://x\n" in shown
    assert shown.endswith(f"  stop    Ctrl-C, or {expected} down --state-dir /state")


def test_a_tandem_on_the_path_needs_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "tandem"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert invocation() == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert invocation() == "tandem"


@pytest.mark.parametrize("is_exposed", [False, True])
def test_a_cluster_that_others_can_reach_is_warned_of(is_exposed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalNarrator(is_detached=True) as narrator:
        narrator(Ready("http://x", "m", "/state", is_exposed))
    assert ("warning: clients are not authenticated" in capsys.readouterr().err) == is_exposed


def test_who_could_reach_a_listener() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
