"""The Llama family on the native CPU kernels: what `LlamaModel` computes, one call per step through all layers."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import torch

from common.cache.layout import KVLayout
from common.model.batch import ForwardBatch
from common.model.checkpoint import Checkpoint
from common.model.config import ModelConfig
from common.model.native_weights import NativeWeightPlan
from common.model.rope import RotaryEmbedding
from common.model.shared_weights import SHARED_MEMORY, WeightMemory, obtain_weights, own_weights
from kernels.decoder.op import BorrowedCores, NativeDecoder
from kernels.decoder.parameters import DecoderShape
from kernels.native.compiler import INSTRUCTION_SETS, library_path
from kernels.native.library import Library


class NativeLlama:
    """See the module. It computes with threads of its own, which start with the first step.

    `weights` may be shared with other processes; `close` says that this one no longer needs them.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        memory: WeightMemory,
        num_threads: int,
        library: Library,
        borrowed: BorrowedCores | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.memory = memory
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self.device)
        shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        weights = NativeWeightPlan(config, dtype).weights(memoryview(memory.memory))
        self._decoder = NativeDecoder(shape, weights, num_threads, library, borrowed)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        on_progress: Callable[[float], None],
        *,
        num_threads: int,
        library: Library,
        is_shared: bool = False,
        folder: Path = SHARED_MEMORY,
        borrowed: BorrowedCores | None = None,
    ) -> Self:
        """Load `checkpoint` as `dtype`, or share what another process of this host has loaded into `folder`.

        `on_progress` gets the fraction done. Raises `ModelUnusable`.
        """
        plan = NativeWeightPlan(checkpoint.config, dtype)

        def fill(memory: memoryview, report: Callable[[float], None]) -> None:
            plan.fill(checkpoint, memory, num_threads, report)

        if is_shared:
            name = _shared_name(checkpoint, dtype, library)
            memory = obtain_weights(name, plan.num_bytes, fill, on_progress, folder)
        else:
            memory = own_weights(plan.num_bytes, fill, on_progress)
        return cls(checkpoint.config, dtype, memory, num_threads, library, borrowed)

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of this model's pages."""
        return self.config.kv_layout(block_size, str(self.dtype).removeprefix("torch."))

    def forward(self, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """Write keys and values of the batch's tokens into `pages`; return hidden states [num_wanted, hidden_size].

        `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        """
        cos, sin = self._rope.angles(batch.positions)
        return self._decoder.forward(
            batch.token_ids,
            cos,
            sin,
            batch.slots,
            batch.wanted,
            batch.block_tables,
            batch.query_lengths,
            batch.context_lengths,
            pages,
        )

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] fp32 of hidden states [num_rows, hidden_size]."""
        return self._decoder.head(hidden)

    def close(self) -> None:
        """Say that this process no longer uses the weights; the last one of the host removes them. Idempotent."""
        self.memory.close()


def _shared_name(checkpoint: Checkpoint, dtype: torch.dtype, library: Library) -> str:
    """Return what differs where packed weights do: of another model, of another type, for other kernels."""
    kernels = next(library_path(isa).stem for isa in INSTRUCTION_SETS if isa.name == library.isa)
    parts = (checkpoint.model_hash(), json.dumps(asdict(checkpoint.config), sort_keys=True), str(dtype), kernels)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
