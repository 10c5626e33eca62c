"""Makes the model of a worker out of its foundation: on the native kernels or on torch's operators."""

from collections.abc import Callable
from typing import Protocol

import torch

from common.lifecycle.cores import usable_cores
from common.model.llama import LlamaModel
from common.model.native_llama import NativeLlama
from common.model.shared_weights import SHARED_MEMORY
from common.runtime.foundation import Foundation
from common.runtime.runner import CausalModel
from common.settings.engine import EngineSettings
from kernels.decoder.op import BorrowedCores
from kernels.native.library import native_library


class LoadedModel(CausalModel, Protocol):
    """A model with weights that this process may share."""

    def close(self) -> None:
        """Say that this process no longer needs the weights. Idempotent."""


def load_model(
    foundation: Foundation,
    settings: EngineSettings,
    on_progress: Callable[[float], None],
    borrowed: BorrowedCores | None = None,
) -> LoadedModel:
    """Load the weights; `on_progress` gets the fraction done, from 0 to 1. Raises `ModelUnusable`.

    Native kernels also compute on the `borrowed` cores.
    """
    library = native_library() if foundation.kernels == "native" else None
    if library is None:
        return LlamaModel.load(foundation.checkpoint, foundation.dtype, on_progress, foundation.device)
    # What is left for torch is small, and threads of its own would wait for work on cores that have some.
    torch.set_num_threads(1)
    return NativeLlama.load(
        foundation.checkpoint,
        foundation.dtype,
        on_progress,
        num_threads=settings.threads or usable_cores(),
        library=library,
        is_shared=True,
        folder=settings.weights_dir or SHARED_MEMORY,
        borrowed=borrowed,
    )
