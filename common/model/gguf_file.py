"""A GGUF file as a checkpoint: mapped into memory, dequantised one tensor at a time when asked for."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.content_hash import hash_files
from common.model.gguf_card import read_card_source
from common.model.gguf_config import read_gguf_config
from common.model.gguf_header import GgufHeader, TensorEntry, read_header
from common.model.gguf_metadata import GgufMetadata
from common.model.gguf_names import ROPE_FACTORS, canonical_name
from common.model.parameters import HEAD, check_parameters

_FIRST_LAYER = "model.layers.0."

Bytes = npt.NDArray[np.uint8]


class GgufFile:
    """See `Checkpoint`. Raises `ModelUnusable` on opening if the file is damaged, incomplete or unsupported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data, header = _map(path)
        self._metadata = GgufMetadata(path, header.values)
        by_name = {entry.name: entry for entry in header.tensors}
        factors = by_name.pop(ROPE_FACTORS, None)
        # An unknown name stays as it is, so that `check_parameters` names it.
        self._tensors = {canonical_name(name) or name: entry for name, entry in by_name.items()}
        self.config = read_gguf_config(
            self._metadata,
            has_head=HEAD in self._tensors,
            attention_bias=f"{_FIRST_LAYER}self_attn.q_proj.bias" in self._tensors,
            mlp_bias=f"{_FIRST_LAYER}mlp.up_proj.bias" in self._tensors,
            rope_factors=None if factors is None else _dequantised(self._stored(factors), factors.kind).tolist(),
        )
        check_parameters(path, {name: entry.shape for name, entry in self._tensors.items()}, self.config)
        for entry in self._tensors.values():
            _require_known_quantisation(path, entry)

    def names(self) -> frozenset[str]:
        """Return the names of all parameters."""
        return frozenset(self._tensors)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter, dequantised; a view of the mapped file only for fp32 stored and wanted."""
        entry = self._tensors[name]
        stored = self._stored(entry)
        if num_heads := self._num_interleaved_heads(name):
            stored = _half_split_rows(stored, entry.shape[0], num_heads)
        return torch.from_numpy(_dequantised(stored, entry.kind).reshape(entry.shape)).to(dtype)

    def card_source(self) -> CardSource:
        """Return the tokenizer rebuilt from the metadata, template, EOS set."""
        return read_card_source(self._metadata)

    def model_hash(self) -> str:
        """Return the digest of the file."""
        return hash_files([self._path])

    def _stored(self, entry: TensorEntry) -> Bytes:
        """Return the bytes of a tensor, mapped: its shape with the last dimension in bytes."""
        mapped = self._data[entry.offset : entry.offset + entry.num_bytes]
        return mapped.reshape(quant_shape_to_byte_shape(entry.shape, entry.kind))

    def _num_interleaved_heads(self, name: str) -> int:
        """Return the heads whose rows the format stores in the order of its own rotary embedding; 0: rows as usual."""
        if ".self_attn.q_proj." in name:
            return self.config.num_heads
        if ".self_attn.k_proj." in name:
            return self.config.num_kv_heads
        return 0


def _map(path: Path) -> tuple[Bytes, GgufHeader]:
    try:
        # Copy on write: torch wants writable arrays, and nothing is ever written.
        data = np.memmap(path, dtype=np.uint8, mode="c")
        return data, read_header(data.data)
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path}: not a usable GGUF file: {error}") from error


def _dequantised(stored: Bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = dequantize(stored, kind)
    return values


def _half_split_rows(stored: Bytes, num_rows: int, num_heads: int) -> Bytes:
    """Reorder the rows of every head from pairs (0, d/2, 1, d/2 + 1, ...) to halves (0, 1, ..., d/2, d/2 + 1, ...).

    GGUF files of Llamas rotate neighbouring rows, Hugging Face the two halves of a head. Rows are quantised one by one,
    so moving their bytes is enough. `stored` is [num_rows, row_bytes], or [num_rows * element_bytes] for a bias.
    """
    pairs = stored.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(stored.shape)


def _require_known_quantisation(path: Path, entry: TensorEntry) -> None:
    if entry.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return
    _, block_bytes = GGML_QUANT_SIZES[entry.kind]
    try:
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), entry.kind)
    except NotImplementedError as error:
        raise ModelUnusable(f"{path}: {entry.name} is stored as {entry.kind.name}, which is not supported") from error
