"""docs/dependencies.md names every direct dependency with the version that the lock pins, and the locks stay lean."""

import re
import tomllib

from packaging.requirements import Requirement

from tests.support.source_tree import ROOT

CUDA_PACKAGES = re.compile(r"^(nvidia-|cuda-|triton)")
NOT_FOR_THE_GATEWAY = {"torch", "transformers", "numpy", "triton", "gguf", "safetensors"}


def test_each_direct_dependency_is_explained() -> None:
    pins = _pins("requirements-dev.lock")
    assert _documented() == {name: pins[name] for name in _direct_names()}


def test_locks_pin_no_cuda_package() -> None:
    assert [name for name in _pins("requirements-dev.lock") if CUDA_PACKAGES.match(name)] == []


def test_gateway_lock_has_no_tensor_stack() -> None:
    assert NOT_FOR_THE_GATEWAY & set(_pins("requirements-gateway.lock")) == set()


def test_locks_agree() -> None:
    gateway, runtime, dev = map(_pins, ("requirements-gateway.lock", "requirements.lock", "requirements-dev.lock"))
    assert gateway.items() <= runtime.items() <= dev.items()
    assert _pins("requirements-compile.lock").items() <= dev.items()


def _pins(lock: str) -> dict[str, str]:
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    pins = (line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))
    return {name: version.strip() for name, version in pins}


def _direct_names() -> set[str]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [
        pyproject["project"]["dependencies"],
        *pyproject["project"]["optional-dependencies"].values(),
        *pyproject["dependency-groups"].values(),
    ]
    return {Requirement(line).name for group in groups for line in group}


def _documented() -> dict[str, str]:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([a-z][a-z0-9-]*) \| ([0-9][^ ]*) \|", text, re.MULTILINE))
