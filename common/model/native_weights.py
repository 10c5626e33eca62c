"""Parameters of a Llama-family model as the native decoder reads them: packed, one behind another in one memory.

A checkpoint is read and packed tensor by tensor, several at a time, straight into its place; so never more than the
largest few of them exist twice. What lies where follows from the model's geometry alone: another process that maps the
memory needs nothing else.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import torch

from common.errors import ModelUnusable
from common.model.checkpoint import Checkpoint
from common.model.config import ModelConfig
from common.model.parameters import EMBEDDING, HEAD, parameter_shapes
from kernels.decoder.parameters import DecoderLayer, DecoderWeights
from kernels.linear.packing import PANEL, PackedLinear, pack_linear, packed_shape

_ALIGNMENT = 64
_FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor at `offset` (bytes)."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, memory: memoryview) -> torch.Tensor:
        flat = torch.frombuffer(memory, dtype=self.dtype, count=math.prod(self.shape), offset=self.offset)
        return flat.view(self.shape)


@dataclass(frozen=True, slots=True)
class _Operand:
    """A norm or the embedding (not packed), or a linear of one or several projections stacked along out_features.

    `names` are those of the weights; the biases are called alike.
    """

    names: tuple[str, ...]
    place: _Place
    is_packed: bool
    is_gated: bool = False
    num_out: int = 0
    num_in: int = 0
    bias: _Place | None = None

    def within(self, memory: memoryview) -> PackedLinear:
        assert self.is_packed
        bias = None if self.bias is None else self.bias.within(memory)
        return PackedLinear(self.place.within(memory), bias, self.num_out, self.num_in, self.is_gated)


class NativeWeightPlan:
    """Where each operand of a model of this geometry lies; `num_bytes` is what they take together."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.num_bytes = 0
        self._config = config
        self._dtype = dtype
        self._shapes = parameter_shapes(config)
        self._operands: dict[str, _Operand] = {}
        for index in range(config.num_layers):
            self._plan_layer(f"model.layers.{index}.")
        self._add_plain(_FINAL_NORM)
        if config.tie_embeddings:  # the decoder looks its rows up in the packed head
            self._add_linear(HEAD, EMBEDDING)
        else:
            self._add_plain(EMBEDDING)
            self._add_linear(HEAD, HEAD)

    def fill(
        self, checkpoint: Checkpoint, memory: memoryview, num_threads: int, on_progress: Callable[[float], None]
    ) -> None:
        """Write the parameters of `checkpoint` into `memory`; `on_progress` gets the fraction done, from 0 to 1.

        `on_progress` is called in several threads, one at a time. Raises `ModelUnusable` naming the tensor that is
        missing or of another shape.
        """
        if misplaced := self._shapes.keys() ^ checkpoint.names():
            name = min(misplaced)
            reason = f"missing tensor {name}" if name in self._shapes else f"the model has no place for {name}"
            raise ModelUnusable(reason)
        on_progress(0.0)
        num_bytes_done = 0
        lock = Lock()

        def write(operand: _Operand) -> None:
            nonlocal num_bytes_done
            self._write(checkpoint, operand, memory)
            with lock:
                num_bytes_done += operand.place.num_bytes
                on_progress(num_bytes_done / total)

        # The largest first, so that no thread is left alone with it at the end.
        operands = sorted(self._operands.values(), key=lambda operand: -operand.place.num_bytes)
        total = sum(operand.place.num_bytes for operand in operands)
        with ThreadPoolExecutor(num_threads, "weights") as pool:
            for done in [pool.submit(write, operand) for operand in operands]:
                done.result()

    def weights(self, memory: memoryview) -> DecoderWeights:
        """Return the parameters in `memory`; nothing is copied."""
        return DecoderWeights(
            embedding=None if self._config.tie_embeddings else self._operands[EMBEDDING].place.within(memory),
            layers=tuple(self._layer(f"model.layers.{index}.", memory) for index in range(self._config.num_layers)),
            norm=self._operands[_FINAL_NORM].place.within(memory),
            head=self._operands[HEAD].within(memory),
        )

    def _plan_layer(self, layer: str) -> None:
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        self._add_plain(f"{layer}input_layernorm.weight")
        self._add_linear(f"{layer}qkv", *(f"{attention}{name}_proj.weight" for name in "qkv"))
        self._add_linear(f"{layer}output", f"{attention}o_proj.weight")
        self._add_plain(f"{layer}post_attention_layernorm.weight")
        self._add_linear(f"{layer}gate_up", f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight", is_gated=True)
        self._add_linear(f"{layer}down", f"{mlp}down_proj.weight")

    def _layer(self, layer: str, memory: memoryview) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self._operands[f"{layer}input_layernorm.weight"].place.within(memory),
            qkv=self._operands[f"{layer}qkv"].within(memory),
            output=self._operands[f"{layer}output"].within(memory),
            mlp_norm=self._operands[f"{layer}post_attention_layernorm.weight"].place.within(memory),
            gate_up=self._operands[f"{layer}gate_up"].within(memory),
            down=self._operands[f"{layer}down"].within(memory),
        )

    def _add_plain(self, name: str) -> None:
        self._operands[name] = _Operand((name,), self._reserve(self._shapes[name], self._dtype), is_packed=False)

    def _add_linear(self, title: str, *names: str, is_gated: bool = False) -> None:
        num_out = sum(self._shapes[name][0] for name in names) // (2 if is_gated else 1)
        num_in = self._shapes[names[0]][1]
        shape = packed_shape(num_out, num_in, self._dtype, is_gated=is_gated)
        has_bias = _bias_of(names[0]) in self._shapes
        self._operands[title] = _Operand(
            names,
            self._reserve(shape, self._dtype),
            is_packed=True,
            is_gated=is_gated,
            num_out=num_out,
            num_in=num_in,
            bias=self._reserve((shape[0] * PANEL,), torch.float32) if has_bias else None,
        )

    def _reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Place:
        place = _Place(self.num_bytes, shape, dtype)
        self.num_bytes += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return place

    def _write(self, checkpoint: Checkpoint, operand: _Operand, memory: memoryview) -> None:
        weight = self._stacked(checkpoint, operand.names)
        target = operand.place.within(memory)
        if not operand.is_packed:
            target.copy_(weight)
            return
        bias = None
        if operand.bias is not None:
            bias = self._stacked(checkpoint, [_bias_of(name) for name in operand.names])
        packed = pack_linear(weight, bias, is_gated=operand.is_gated, out=target)
        if operand.bias is not None:
            assert packed.bias is not None
            operand.bias.within(memory).copy_(packed.bias)

    def _stacked(self, checkpoint: Checkpoint, names: Sequence[str]) -> torch.Tensor:
        parts = list(self._parts(checkpoint, names))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts(self, checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            tensor = checkpoint.tensor(name, self._dtype)
            if tensor.shape != self._shapes[name]:
                raise ModelUnusable(f"{name} has shape {list(tensor.shape)}, expected {list(self._shapes[name])}")
            yield tensor


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"
