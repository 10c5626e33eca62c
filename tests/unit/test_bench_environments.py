"""An environment of a peer is installed once, whole, and never with a GPU's packages."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import environments
from bench.environments import NotInstalled, environment


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Commands that would have been run; a dry run reports an ordinary package."""
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> str:
        ran.append(command)
        return '{"install": [{"metadata": {"name": "numpy"}}]}'

    monkeypatch.setattr(environments, "CACHE", tmp_path)
    monkeypatch.setattr(environments, "run", run)
    (tmp_path / "peer-1").mkdir()
    return ran


def test_it_is_installed_once_and_rid_of_what_is_not_wanted(commands: list[Sequence[str]], tmp_path: Path) -> None:
    assert environment("Peer 1", "peer-1", ["peer==1"], ["video"]) == tmp_path / "peer-1"
    num_commands = len(commands)
    assert commands[-1][-4:] == ["uninstall", "-q", "-y", "video"]
    environment("Peer 1", "peer-1", ["peer==1"], ["video"])
    assert len(commands) == num_commands


def test_the_gpu_build_of_torch_is_refused_before_it_is_fetched(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str]) -> str:
        commands.append(command)
        return '{"install": [{"metadata": {"name": "nvidia-cublas"}}]}'

    monkeypatch.setattr(environments, "run", run)
    with pytest.raises(NotInstalled, match="GPU build"):
        environment("Peer 1", "peer-1", ["peer==1", "torch==2.13.0"])
    assert not [command for command in commands if "install" in command and "--dry-run" not in command]


def test_what_pip_said_is_told_and_the_next_run_tries_again(
    commands: list[Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(1, command, stderr="no such version")

    monkeypatch.setattr(environments, "run", fail)
    with pytest.raises(NotInstalled, match="Peer 1 is not measured: no such version"):
        environment("Peer 1", "peer-1", ["peer==1"])
    assert not (tmp_path / "peer-1" / "installed").exists()
