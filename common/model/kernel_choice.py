"""What computes a model: the native kernels or torch's operators. Imports no tensor library: `doctor` asks, too."""

from typing import Literal

from common.errors import InvalidSetting
from kernels.native.compiler import library_path, runnable_sets

KernelChoice = Literal["native", "torch"]


def choose_kernels(wanted: str, device: str) -> KernelChoice:
    """Return what to compute with on `device` ("cpu", "cuda"), where `wanted` is "auto", "native" or "torch".

    Raises `InvalidSetting` if the native kernels are insisted on and cannot be had.
    """
    if wanted == "torch":
        return "torch"
    is_possible = device == "cpu" and built_instruction_set() is not None
    if wanted == "native" and not is_possible:
        reason = why_not_native() if device == "cpu" else f"they are made for CPUs, the device is {device}"
        raise InvalidSetting("kernels", wanted, reason)
    return "native" if is_possible else "torch"


def built_instruction_set() -> str | None:
    """Return the best instruction set that runs here and whose kernels are built; None if there is none."""
    return next((isa.name for isa in runnable_sets() if library_path(isa).exists()), None)


def why_not_native() -> str:
    """Return why the native kernels cannot be used, or what to do."""
    if not runnable_sets():
        return "they are made for x86-64 with AVX2 on Linux"
    return "they are not built; run: python -m kernels.native.compiler"
