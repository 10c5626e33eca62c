"""Compiles the native kernels: one shared library per instruction set, named by a hash of all that goes into it.

`python -m kernels.native.compiler` builds what this machine can run; `--all` every instruction set, for an image.
Nothing is compiled while a worker starts: without a fitting library it computes with torch.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent
LIBRARIES = Path(__file__).resolve().parent / "lib"

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread")
# GCC 12 takes the deliberately undefined registers in its own AVX-512 headers for a mistake.
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`cpu_flags` are the names in /proc/cpuinfo of all that its library needs."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_AVX512_CPU = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"})

INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
        _AVX512_CPU | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
    ),
    InstructionSet(
        "avx512bf16",
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        _AVX512_CPU | {"avx512_bf16", "avx512_vnni"},
    ),
    InstructionSet("avx512", _AVX512, _AVX512_CPU),
    InstructionSet("avx2", _AVX2, frozenset({"avx2", "fma", "f16c"})),
)
"""Best first."""


class CompilationFailed(Exception):
    """No compiler, or it refused; the text is for people."""


def runnable_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this machine can run, best first; none on other architectures than x86-64."""
    if not _is_made_for_this_system():
        return ()
    flags = _cpu_flags(Path("/proc/cpuinfo"))
    return tuple(isa for isa in INSTRUCTION_SETS if isa.cpu_flags <= flags)


def library_path(isa: InstructionSet) -> Path:
    """Return where the library of the present sources is, or would be."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *isa.compiler_flags)).encode())
    for source in sorted((*_sources(), *KERNELS.glob("*/*.h"))):
        digest.update(f"\0{source.relative_to(KERNELS)}\0".encode())
        digest.update(source.read_bytes())
    return LIBRARIES / f"{isa.name}-{digest.hexdigest()[:16]}.so"


def build(isa: InstructionSet) -> Path:
    """Compile the library of `isa` unless it is there; return its path. Raises `CompilationFailed`."""
    target = library_path(isa)
    target.parent.mkdir(exist_ok=True)
    with (target.parent / f"{isa.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever else builds it waits, and finds it
        if target.exists():
            return target
        compile_library(isa, _sources(), target)
        for stale in target.parent.glob(f"{isa.name}-*.so"):
            if stale != target:
                stale.unlink()
    return target


def compile_library(isa: InstructionSet, sources: Sequence[Path], target: Path, flags: Sequence[str] = ()) -> None:
    """Compile `sources` with `flags` besides those of `isa` and link them as `target`. Raises `CompilationFailed`."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:

        def compile_one(source: Path) -> str:
            output = Path(directory) / f"{source.parent.name}-{source.stem}.o"
            _run([compiler, *_FLAGS, *_WARNINGS, *isa.compiler_flags, *flags, "-c", str(source), "-o", str(output)])
            return str(output)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        linked = Path(directory) / target.name
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
        linked.rename(target)  # whoever loads it sees all of it or nothing


def _sources() -> list[Path]:
    return sorted(KERNELS.glob("*/*.cpp"))


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise CompilationFailed(f"no C++ compiler: {wanted or 'neither g++ nor clang++'} is on the path")
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilationFailed(f"{' '.join(command)} failed:\n{done.stderr}")


def _is_made_for_this_system() -> bool:
    return platform.machine() == "x86_64" and sys.platform == "linux"


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def main() -> int:
    """Build and print one line per library; 0 if all wanted are there."""
    parser = argparse.ArgumentParser(prog="python -m kernels.native.compiler", description=main.__doc__)
    parser.add_argument("--all", action="store_true", help="every instruction set, not only what this machine runs")
    is_for_all = parser.parse_args().all and _is_made_for_this_system()
    wanted = INSTRUCTION_SETS if is_for_all else runnable_sets()
    if not wanted:
        sys.stderr.write("Native kernels need x86-64 with AVX2; workers will compute with torch\n")
        return 0
    try:
        for isa in wanted:
            sys.stdout.write(f"{isa.name}: {build(isa)}\n")
    except CompilationFailed as error:
        sys.stderr.write(f"Native kernels are not built, workers will compute with torch: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
