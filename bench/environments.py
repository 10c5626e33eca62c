"""Virtual environments of programs that are measured beside ours: pinned packages, one environment each."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import CACHE

TOLD_OF_PIP = 500
UNWANTED_BUILDS = ("nvidia-", "cuda-")
"""Packages of several gigabytes that come with a GPU's build of torch, which no CPU benchmark needs."""


class NotInstalled(Exception):
    """A peer cannot be had on this machine."""


def environment(label: str, folder_name: str, requirements: Sequence[str], without: Sequence[str] = ()) -> Path:
    """Return the folder of an environment that has `requirements`, installed if it was not there.

    Packages of `without` are removed again. TORCH_INDEX_URL, if set, is one more index, as for `make setup`. Raises
    `NotInstalled` with the end of what pip said, or if that would install the GPU build of torch.
    """
    folder = CACHE / folder_name
    if (folder / "installed").exists():
        return folder
    try:
        run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "-q", *_more_index(), *requirements]
        if any(requirement.startswith("torch==") for requirement in requirements):
            _refuse_gpu_build(label, run([*install, "--dry-run", "--report", "-"]))
        run(install)
        if without:
            run([*pip, "uninstall", "-q", "-y", *without])
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise NotInstalled(f"{label} is not measured: {output.strip()[-TOLD_OF_PIP:]}") from error
    (folder / "installed").touch()
    return folder


def run(command: Sequence[str]) -> str:
    """Run a command to its end; return what it wrote to its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _more_index() -> list[str]:
    url = os.environ.get("TORCH_INDEX_URL")
    return ["--extra-index-url", url] if url else []


def _refuse_gpu_build(label: str, report: str) -> None:
    found = [name for name in UNWANTED_BUILDS if f'"name": "{name}' in report]
    if found:
        raise NotInstalled(
            f"{label} is not measured: the index serves the GPU build of torch; set TORCH_INDEX_URL to the address of "
            "PyTorch's CPU wheel index"
        )
