"""All implementations of sampling that run here: torch's operators, and the native kernel per instruction set."""

import functools
import os
import shutil
from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.native.compiler import InstructionSet, build, runnable_sets
from kernels.native.library import Library, open_library
from kernels.sampling import native
from kernels.sampling.logprobs import RowLogprobs, row_logprobs_by_torch
from kernels.sampling.op import NoToken, sample_by_torch, sample_natively
from kernels.sampling.row import SamplingRow

Sampler = Callable[[torch.Tensor, Sequence[SamplingRow]], list[int | NoToken]]
Scorer = Callable[[torch.Tensor, Sequence[int], int], RowLogprobs]


@functools.cache
def built_library(isa: InstructionSet) -> Library:
    """Return the native library of the present sources; built if it is not there."""
    build(isa)
    library = open_library(isa)
    assert library is not None
    return library


def _native_sampler(isa: InstructionSet) -> Sampler:
    return lambda logits, rows: sample_natively(built_library(isa), logits, rows)


def _native_scorer(isa: InstructionSet) -> Scorer:
    return lambda logits, tokens, num_top: RowLogprobs(
        *native.logprobs(built_library(isa), logits, tokens, min(num_top, logits.shape[1]))
    )


_HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
_NEEDS_COMPILER = pytest.mark.skipif(not _HAS_COMPILER, reason="no C++ compiler")

SAMPLERS = [
    pytest.param(sample_by_torch, id="torch"),
    *(pytest.param(_native_sampler(isa), id=isa.name, marks=_NEEDS_COMPILER) for isa in runnable_sets()),
]
"""For a fixture that gives a `Sampler`."""

SCORERS = [
    pytest.param(row_logprobs_by_torch, id="torch"),
    *(pytest.param(_native_scorer(isa), id=isa.name, marks=_NEEDS_COMPILER) for isa in runnable_sets()),
]
"""For a fixture that gives a `Scorer`."""
