"""The Llama family (Llama 2 and 3, SmolLM2, ...): one forward pass over a ragged batch with paged keys and values.

The model owns its weights and nothing else; pages belong to the caller, and the pass writes only the batch's slots.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch.nn import functional

from common.cache.layout import KVLayout
from common.model.batch import ForwardBatch
from common.model.checkpoint import Checkpoint
from common.model.config import ModelConfig
from common.model.llama_weights import LayerWeights, LlamaWeights, Projection, load_weights
from common.model.rope import RotaryEmbedding
from kernels.paged_attention.op import paged_attention
from kernels.paged_attention.plan import AttentionPlan, plan_attention
from kernels.rms_norm.op import add_rms_norm, rms_norm
from kernels.rotary.op import RotaryPlan, plan_rotary, rotary_kv_write
from kernels.silu_mul.op import silu_mul

CPU = torch.device("cpu")


class LlamaModel:
    """See the module. Not changed after construction, so threads may share it."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights
        self._rope = RotaryEmbedding(config.rope, config.head_dim, weights.embedding.device)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        on_progress: Callable[[float], None],
        device: torch.device = CPU,
    ) -> Self:
        """Load `checkpoint` as `dtype`; `on_progress` gets the fraction done. Raises `ModelUnusable`."""
        return cls(checkpoint.config, load_weights(checkpoint, dtype, device, on_progress))

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations, keys and values."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of this model's pages."""
        return self.config.kv_layout(block_size, str(self.dtype).removeprefix("torch."))

    def forward(self, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        """Write keys and values of the batch's tokens into `pages`; return hidden states [num_wanted, hidden_size].

        `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        """
        rotary = plan_rotary(*self._rope.angles(batch.positions), batch.slots, pages)
        attention = plan_attention(pages, batch.query_lengths, batch.context_lengths, batch.block_tables)
        weights, eps = self._weights, self.config.rms_norm_eps
        residual = functional.embedding(batch.token_ids, weights.embedding)
        normed = rms_norm(residual, weights.layers[0].attention_norm, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attend(layer, index, normed, pages, rotary, attention)
            if index == last:  # nobody reads the other rows any more
                attended, residual = attended[batch.wanted], residual[batch.wanted]
            normed = add_rms_norm(residual, _project(attended, layer.output), layer.mlp_norm, eps)
            delta = _project(silu_mul(_project(normed, layer.gate_up)), layer.down)
            next_norm = weights.norm if index == last else weights.layers[index + 1].attention_norm
            normed = add_rms_norm(residual, delta, next_norm, eps)
        return normed

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] fp32 of hidden states [num_rows, hidden_size]."""
        return functional.linear(hidden, self._weights.head).float()

    def close(self) -> None:
        """Nothing is shared with other processes."""

    def _attend(
        self,
        layer: LayerWeights,
        index: int,
        normed: torch.Tensor,
        pages: torch.Tensor,
        rotary: RotaryPlan,
        attention: AttentionPlan,
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads * head_dim] and write the layer's keys and values."""
        qkv = _project(normed, layer.qkv).view(len(normed), -1, self.config.head_dim)
        query = rotary_kv_write(qkv, pages, index, rotary)
        return paged_attention(query, pages, index, attention)


def _project(hidden: torch.Tensor, projection: Projection) -> torch.Tensor:
    return functional.linear(hidden, projection.weight, projection.bias)
