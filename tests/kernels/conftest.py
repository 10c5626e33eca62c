"""The native libraries of every instruction set that runs here, built once per session, and probes for their parts."""

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.native.compiler import KERNELS, InstructionSet, build, compile_library, runnable_sets
from kernels.native.library import Library, open_library

PROBES = Path(__file__).resolve().parent / "probes"

Probe = Callable[..., ctypes.CDLL]


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """Torch's threads spin while they wait for each other, for seconds where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=runnable_sets() or [None], ids=lambda isa: isa.name if isa else "none")
def isa(request: pytest.FixtureRequest) -> InstructionSet:
    """Each instruction set in turn."""
    if request.param is None:
        pytest.skip("native kernels are made for x86-64 with AVX2 on Linux")
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    selected: InstructionSet = request.param
    return selected


@pytest.fixture(scope="session")
def library(isa: InstructionSet) -> Library:
    """The native library of `isa`."""
    build(isa)
    opened = open_library(isa)
    assert opened is not None
    return opened


@pytest.fixture(scope="session")
def probe(isa: InstructionSet, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """Compile probes/NAME.cpp, with sources of the kernels if it needs some, and open it."""
    directory = tmp_path_factory.mktemp(f"probes-{isa.name}")

    def compile_probe(name: str, *sources: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
        target = directory / f"{name}.so"
        if not target.exists():
            all_sources = [PROBES / f"{name}.cpp", *(KERNELS / source for source in sources)]
            compile_library(isa, all_sources, target, ("-I", str(KERNELS), *flags))
        return ctypes.CDLL(str(target))

    return compile_probe
