"""What a native decoder is made of and given, and the same as the C structures of `parameters.h`."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.linear.packing import PackedLinear
from kernels.native.arguments import address


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What the weights' own shapes do not tell."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Norms are [hidden_size]; `qkv` is stacked in this order; `gate_up` is gated."""

    attention_norm: torch.Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, contiguous on the CPU, all of one dtype.

    `embedding` is [vocab_size, hidden_size], or None to take the rows of `head`, where the two are tied.
    """

    embedding: torch.Tensor | None
    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    head: PackedLinear


class LinearStructure(ctypes.Structure):
    """`LinearParameters`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
    )


class LayerStructure(ctypes.Structure):
    """`LayerParameters`."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("qkv", LinearStructure),
        ("output", LinearStructure),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", LinearStructure),
        ("down", LinearStructure),
    )


class DecoderStructure(ctypes.Structure):
    """`DecoderParameters`."""

    _fields_ = (
        ("hidden_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("embedding", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("layers", ctypes.POINTER(LayerStructure)),
        ("norm", ctypes.c_void_p),
        ("head", LinearStructure),
    )


class BatchStructure(ctypes.Structure):
    """`DecoderBatch`, with `AttentionBatch` in it."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
        ("wanted", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("query_lengths", ctypes.POINTER(ctypes.c_int64)),
        ("context_lengths", ctypes.POINTER(ctypes.c_int64)),
        ("block_tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
    )


def decoder_structure(shape: DecoderShape, weights: DecoderWeights) -> DecoderStructure:
    """Check that `weights` fit each other and `shape`; return them as C reads them. The weights must live on."""
    _check(shape, weights)
    layers = [_layer_structure(layer) for layer in weights.layers]
    return DecoderStructure(
        weights.head.num_in,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        weights.head.num_out,
        shape.rms_norm_eps,
        None if weights.embedding is None else address(weights.embedding),
        len(layers),
        (LayerStructure * len(layers))(*layers),
        address(weights.norm),
        _linear_structure(weights.head),
    )


def int64_array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return `numbers` as C reads them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _layer_structure(layer: DecoderLayer) -> LayerStructure:
    return LayerStructure(
        address(layer.attention_norm),
        _linear_structure(layer.qkv),
        _linear_structure(layer.output),
        address(layer.mlp_norm),
        _linear_structure(layer.gate_up),
        _linear_structure(layer.down),
    )


def _linear_structure(linear: PackedLinear) -> LinearStructure:
    bias = None if linear.bias is None else address(linear.bias)
    return LinearStructure(address(linear.packed), bias, linear.num_out, linear.num_in, linear.is_gated)


def _check(shape: DecoderShape, weights: DecoderWeights) -> None:
    dtype, hidden, vocab = weights.head.dtype, weights.head.num_in, weights.head.num_out
    assert weights.layers
    assert shape.num_heads % shape.num_kv_heads == 0, shape
    assert shape.head_dim % 2 == 0, shape
    attended = shape.num_heads * shape.head_dim
    qkv = attended + 2 * shape.num_kv_heads * shape.head_dim
    _check_linear(weights.head, vocab, hidden, dtype)
    _check_tensor(weights.norm, (hidden,), dtype)
    if weights.embedding is not None:
        _check_tensor(weights.embedding, (vocab, hidden), dtype)
    for layer in weights.layers:
        _check_tensor(layer.attention_norm, (hidden,), dtype)
        _check_tensor(layer.mlp_norm, (hidden,), dtype)
        _check_linear(layer.qkv, qkv, hidden, dtype)
        _check_linear(layer.output, hidden, attended, dtype)
        _check_linear(layer.gate_up, layer.down.num_in, hidden, dtype, is_gated=True)
        _check_linear(layer.down, hidden, layer.down.num_in, dtype)


def _check_linear(
    linear: PackedLinear, num_out: int, num_in: int, dtype: torch.dtype, *, is_gated: bool = False
) -> None:
    assert (linear.num_out, linear.num_in, linear.is_gated) == (num_out, num_in, is_gated), linear
    assert linear.dtype == dtype, (linear.dtype, dtype)


def _check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous(), tensor.stride()
