"""Parameters of a Llama-family model in the form that it computes with: q, k, v as one matrix, gate and up as one.

Every tensor of the checkpoint is placed exactly once; one that is missing, left over or of another shape is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.errors import ModelUnusable
from common.model.checkpoint import Checkpoint
from common.model.config import ModelConfig
from common.model.parameters import EMBEDDING, HEAD, parameter_shapes


@dataclass(frozen=True, slots=True)
class Projection:
    """`weight` [out_features, in_features] and `bias` [out_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; `qkv` and `gate_up` are stacked along out_features in the order of their names."""

    attention_norm: torch.Tensor
    qkv: Projection
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model; `head` is `embedding` itself if they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: Callable[[float], None]
) -> LlamaWeights:
    """Place all tensors of `checkpoint` as `dtype`; `on_progress` gets the fraction done, from 0 to 1.

    Raises `ModelUnusable` naming the tensor that is missing, of another shape, or has no place.
    """
    placement = _Placement(checkpoint, dtype, device, on_progress)
    config = checkpoint.config
    embedding = placement.take(EMBEDDING)
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(_load_layer(placement, index, config) for index in range(config.num_layers)),
        norm=placement.take("model.norm.weight"),
        head=embedding if config.tie_embeddings else placement.take(HEAD),
    )
    placement.finish()
    return weights


class _Placement:
    """Hands out each tensor of a checkpoint once and counts what is done."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: Callable[[float], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._shapes = parameter_shapes(checkpoint.config)
        self._left = set(checkpoint.names())
        self._num_names = len(self._left)
        on_progress(0.0)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor that is used as it is; a view of the file where that holds just these numbers."""
        return self._load(name).to(self._device)

    def take_projection(self, names: Sequence[str], *, has_bias: bool) -> Projection:
        """Return the projections `names` (without suffix) as one, stacked along out_features."""
        return Projection(
            weight=self._stack([f"{name}.weight" for name in names]),
            bias=self._stack([f"{name}.bias" for name in names]) if has_bias else None,
        )

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self._left:
            raise ModelUnusable(f"the model has no place for {', '.join(sorted(self._left))}")

    def _stack(self, names: Sequence[str]) -> torch.Tensor:
        if len(names) == 1:
            return self.take(names[0])
        sizes = [self._shapes[name][0] for name in names]
        stacked = torch.empty((sum(sizes), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        # One part is loaded, copied and dropped at a time: never two copies of a whole layer.
        for name, part in zip(names, torch.split(stacked, sizes), strict=True):
            part.copy_(self._load(name))
        return stacked

    def _load(self, name: str) -> torch.Tensor:
        if name not in self._left:
            raise ModelUnusable(f"missing tensor {name}")
        tensor = self._checkpoint.tensor(name, self._dtype)
        if tensor.shape != self._shapes[name]:
            raise ModelUnusable(f"{name} has shape {list(tensor.shape)}, expected {list(self._shapes[name])}")
        self._left.remove(name)
        self._on_progress(1 - len(self._left) / self._num_names)
        return tensor


def _load_layer(placement: _Placement, index: int, config: ModelConfig) -> LayerWeights:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return LayerWeights(
        attention_norm=placement.take(f"{layer}.input_layernorm.weight"),
        qkv=placement.take_projection(
            [f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"], has_bias=config.attention_bias
        ),
        output=placement.take_projection([f"{attention}.o_proj"], has_bias=config.attention_bias),
        mlp_norm=placement.take(f"{layer}.post_attention_layernorm.weight"),
        gate_up=placement.take_projection([f"{mlp}.gate_proj", f"{mlp}.up_proj"], has_bias=config.mlp_bias),
        down=placement.take_projection([f"{mlp}.down_proj"], has_bias=config.mlp_bias),
    )
