"""The ways to compute a Llama: torch's operators, and the native kernels of each instruction set that runs here."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from common.model.checkpoint import Checkpoint
from common.model.llama import LlamaModel
from common.model.native_llama import NativeLlama
from kernels.native.compiler import InstructionSet, build, runnable_sets
from kernels.native.library import open_library

AnyLlama = LlamaModel | NativeLlama


@dataclass(frozen=True)
class ModelPath:
    """One way; without an instruction set it is torch's."""

    isa: InstructionSet | None
    num_threads: int

    def __str__(self) -> str:
        return "torch" if self.isa is None else f"{self.isa.name}-{self.num_threads}"

    def load(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype = torch.float32,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> AnyLlama:
        """Return the model; the test is skipped where its kernels cannot be built."""
        if self.isa is None:
            return LlamaModel.load(checkpoint, dtype, on_progress)
        if not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("no C++ compiler")
        build(self.isa)
        library = open_library(self.isa)
        assert library is not None
        return NativeLlama.load(checkpoint, dtype, on_progress, num_threads=self.num_threads, library=library)


TORCH = ModelPath(None, 1)
NATIVE = tuple(ModelPath(isa, num_threads) for isa in runnable_sets() for num_threads in (1, 2))
ALL = (TORCH, *NATIVE)
"""A set is tried with one thread and with two."""

FASTEST = (TORCH, *NATIVE[1:2])
"""Torch, and the best set with two threads: where a model is large."""
