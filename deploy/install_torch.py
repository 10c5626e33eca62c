"""Installs the pinned torch, and keeps a CUDA build of several gigabytes off a machine that asked for a CPU build.

Called by `make setup` and by the worker image with the interpreter to install into. `TORCH=cuda` asks for the CUDA
build with its libraries and Triton; `TORCH_INDEX_URL` names the package index that serves the wanted build.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
CUDA_BUILD_REFUSED = (
    "The package index serves the CUDA build of {pin} here. For the CPU build set TORCH_INDEX_URL to the address of "
    "PyTorch's CPU wheel index (see README, 'Installing torch'); on a GPU host set TORCH=cuda."
)


def main() -> int:
    """Install; returns the exit status."""
    pin = next(line for line in LOCK.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    index_url = os.environ.get("TORCH_INDEX_URL")
    arguments = ["--index-url", index_url, pin] if index_url else [pin]
    if os.environ.get("TORCH", "cpu") == "cuda":
        return _pip("--constraint", str(LOCK), *arguments).returncode
    report = _pip("--dry-run", "--ignore-installed", "--no-deps", "--report", "-", *arguments, is_captured=True)
    if report.returncode:
        return report.returncode
    if _is_cuda_build(report.stdout):
        sys.stderr.write(CUDA_BUILD_REFUSED.format(pin=pin) + "\n")
        return 1
    return _pip("--no-deps", *arguments).returncode


def _pip(*arguments: str, is_captured: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "-qq", *arguments]
    return subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if is_captured else None)


def _is_cuda_build(report: str) -> bool:
    (torch,) = json.loads(report)["install"]
    requirements: list[str] = torch["metadata"].get("requires_dist", [])
    return any(line.startswith(CUDA_PACKAGES) and "extra ==" not in line for line in requirements)


if __name__ == "__main__":
    sys.exit(main())
