"""What a figure belongs to: the machine, and the commit that was measured."""

import os
import platform
import subprocess
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".bench"
"""Where benchmarks write their figures and keep what they install; not in the repository."""


def commit() -> str:
    """Return the commit of the checkout, marked if files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, object]:
    """Return what a reader needs to compare figures of two machines."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    """Return the name of the processor; "unknown" if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
