"""What computes a model, by what is asked for and what there is."""

from pathlib import Path

import pytest

from common.errors import InvalidSetting
from common.model import kernel_choice
from common.model.kernel_choice import built_instruction_set, choose_kernels, why_not_native
from kernels.native.compiler import INSTRUCTION_SETS, InstructionSet

BEST, SECOND = INSTRUCTION_SETS[:2]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that runs two instruction sets; the kernels of one are built when its file is made here."""
    monkeypatch.setattr(kernel_choice, "runnable_sets", lambda: (BEST, SECOND))
    monkeypatch.setattr(kernel_choice, "library_path", lambda isa: tmp_path / isa.name)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "device", "isa", "chosen"),
    [
        ("auto", "cpu", SECOND, "native"),
        ("auto", "cpu", None, "torch"),
        ("auto", "cuda", BEST, "torch"),
        ("native", "cpu", BEST, "native"),
        ("torch", "cpu", BEST, "torch"),
    ],
)
def test_choice(built: Path, wanted: str, device: str, isa: InstructionSet | None, chosen: str) -> None:
    if isa is not None:
        (built / isa.name).touch()
    assert choose_kernels(wanted, device) == chosen


def test_native_kernels_that_cannot_be_had_are_refused_with_what_to_do(built: Path) -> None:
    with pytest.raises(InvalidSetting, match="they are not built; run"):
        choose_kernels("native", "cpu")
    (built / BEST.name).touch()
    with pytest.raises(InvalidSetting, match="the device is cuda"):
        choose_kernels("native", "cuda")


def test_the_best_that_is_built_is_named(built: Path) -> None:
    assert built_instruction_set() is None
    (built / SECOND.name).touch()
    assert built_instruction_set() == SECOND.name
    (built / BEST.name).touch()
    assert built_instruction_set() == BEST.name


def test_a_machine_that_runs_none_is_told_so(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "runnable_sets", lambda: ())
    assert why_not_native() == "they are made for x86-64 with AVX2 on Linux"
    assert choose_kernels("auto", "cpu") == "torch"
