"""Native libraries are named by what goes into them, built if there is a compiler, done without if there is none."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import compiler, library
from kernels.native.compiler import INSTRUCTION_SETS, CompilationFailed, InstructionSet, build, library_path

PLAIN = InstructionSet("plain", (), frozenset())


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels with one source and one header, which stands for the real one."""
    folder = tmp_path / "kernels" / "answer"
    folder.mkdir(parents=True)
    (folder / "answer.h").write_text("constexpr int kAnswer = 42;\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return kAnswer; }\n'
    )
    monkeypatch.setattr(compiler, "KERNELS", folder.parent)
    monkeypatch.setattr(compiler, "LIBRARIES", tmp_path / "lib")
    return folder


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    library.native_library.cache_clear()
    monkeypatch.setattr(library, "runnable_sets", lambda: (PLAIN,))


def test_a_built_library_is_found_and_called(sources: Path, runnable: None, isa: InstructionSet) -> None:
    path = build(PLAIN)
    assert path == library_path(PLAIN)
    opened = library.native_library.__wrapped__()
    assert opened is not None
    assert opened.isa == "plain"
    assert opened.functions.answer() == 42


def test_a_changed_source_or_header_is_another_library(sources: Path, isa: InstructionSet) -> None:
    first = build(PLAIN)
    changed = first.stat().st_mtime_ns
    assert build(PLAIN) == first
    assert first.stat().st_mtime_ns == changed  # not built again
    (sources / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    second = library_path(PLAIN)
    assert second != first
    assert not second.exists()
    (sources / "more.cpp").write_text("int more() { return 1; }\n")
    third = build(PLAIN)
    assert third not in (first, second)
    assert [path.suffix for path in sorted(third.parent.iterdir())] == [".so", ".lock"]  # the old one is gone


def test_names_tell_instruction_sets_apart(sources: Path) -> None:
    assert len({library_path(isa).name for isa in INSTRUCTION_SETS}) == len(INSTRUCTION_SETS)


@pytest.mark.parametrize("where", ["absent", "mistaken"])
def test_a_build_that_fails_says_so_and_leaves_nothing(
    where: str, sources: Path, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "absent":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        (sources / "answer.cpp").write_text("int answer() { return nothing; }\n")
    with pytest.raises(CompilationFailed, match="no-such-compiler" if where == "absent" else "nothing"):
        build(PLAIN)
    assert not list(compiler.LIBRARIES.glob("*.so"))


def test_without_a_compiler_the_command_fails_in_words(tmp_path: Path) -> None:
    if not compiler.runnable_sets():
        pytest.skip("nothing would be compiled here")
    program = (
        "import sys, pathlib; from kernels.native import compiler; "
        f"compiler.LIBRARIES = pathlib.Path({str(tmp_path)!r}); sys.argv = ['compiler']; sys.exit(compiler.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"CXX": "no-such-compiler"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "workers will compute with torch" in done.stderr
    assert "no-such-compiler" in done.stderr


def test_without_a_library_it_is_none_and_said_once(
    sources: Path, runnable: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert library.native_library() is None
        assert library.native_library() is None
    assert [record.message for record in caplog.records] == [
        "computing with torch's operators: the native kernels are not built (python -m kernels.native.compiler)"
    ]
    library.native_library.cache_clear()


def test_a_lesser_library_serves_until_the_best_is_built(
    sources: Path, isa: InstructionSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    better = InstructionSet("better", ("-O1",), frozenset())
    monkeypatch.setattr(library, "runnable_sets", lambda: (better, PLAIN))
    build(PLAIN)
    opened = library.native_library.__wrapped__()
    assert opened is not None
    assert opened.isa == "plain"
    assert "better" in caplog.text


def test_cpu_flags_are_read_whole(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nvmx flags : avx2\nflags\t\t: fpu avx2 fma\nflags : later\n")
    assert compiler._cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    cpuinfo.write_text("Features : asimd\n")
    assert compiler._cpu_flags(cpuinfo) == frozenset()
