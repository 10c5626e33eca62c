"""Every module imports alone, and no import of the gateway or the command line loads the tensor stack."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import PACKAGES, ROOT, module_names

# Each module is imported in a process of its own, forked from one that has already loaded the libraries: what is tested
# are the imports among our own modules, and loading torch anew for each would take minutes.
IMPORT_EACH_ALONE = """
import importlib, os, sys, traceback
for library in sys.argv[1].split():
    importlib.import_module(library)
broken = []
for name in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        broken.append(name)
sys.exit(" ".join(broken) or 0)
"""
IMPORT_ALL_AND_LIST = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.stdout.write(" ".join(sys.modules))
"""
LIGHT_LIBRARIES = "aiohttp grpc msgspec redis prometheus_client opentelemetry.sdk.trace"
TENSOR_LIBRARIES = f"{LIGHT_LIBRARIES} torch transformers"
TENSOR_STACK = {"torch", "triton", "transformers", "numpy"}
WITHOUT_TENSORS = ("gateway", "tandem")
GROUPS = {
    LIGHT_LIBRARIES: (*WITHOUT_TENSORS, "proto"),
    TENSOR_LIBRARIES: ("prefill_worker", "decode_worker", "common", "kernels"),
}


def test_every_package_is_in_a_group() -> None:
    assert sorted(package for group in GROUPS.values() for package in group) == sorted(PACKAGES)


@pytest.mark.parametrize("libraries", GROUPS, ids=["light", "tensors"])
def test_each_module_imports_alone(libraries: str) -> None:
    names = [name for package in GROUPS[libraries] for name in _importable(package)]
    outcome = _python(IMPORT_EACH_ALONE, libraries, *names)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("package", WITHOUT_TENSORS)
def test_the_tensor_stack_stays_out(package: str) -> None:
    outcome = _python(IMPORT_ALL_AND_LIST, *_importable(package))
    assert outcome.returncode == 0, outcome.stderr
    assert TENSOR_STACK & set(outcome.stdout.split()) == set()


def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    outcome = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, text=True, capture_output=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def _importable(package: str) -> list[str]:
    # A __main__ runs its program when it is imported.
    return [name for name in module_names(package) if not name.endswith("__main__")]


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, timeout=100)
