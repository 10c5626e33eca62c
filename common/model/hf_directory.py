"""A Hugging Face directory as a checkpoint: safetensors files, one or several with an index, mapped into memory.

The index is authoritative: of each shard only the tensors that `weight_map` assigns to it are read, and no file that it
does not name. What lies around beside that is logged.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.config import ModelConfig
from common.model.content_hash import hash_files
from common.model.hf_card import read_card_source
from common.model.hf_config import read_hf_config, read_json
from common.model.parameters import EMBEDDING, HEAD, check_parameters

_log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints store this buffer; it follows from the config."""


class _Shard(Protocol):
    """What is used of `safe_open`, which has no types."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> Any: ...  # noqa: ANN401 - a class of the library without a name in Python


class HfDirectory:
    """See `Checkpoint`. Raises `ModelUnusable` on opening if anything is missing, damaged, unknown or unsupported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        config = read_hf_config(path)
        shards = _shards(path)
        self._files = [path / file for file in shards]
        self._handles = {
            name: handle for file, names in shards.items() for name, handle in _open_shard(path / file, names).items()
        }
        _log_stray_files(path, shards)
        self.config = self._resolve_head(config)
        check_parameters(
            path, {name: _shape(path, name, handle) for name, handle in self._handles.items()}, self.config
        )

    def names(self) -> frozenset[str]:
        """Return the names of all parameters."""
        return frozenset(self._handles)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter; a view of the mapped file if it is stored as `dtype`."""
        return self._handles[name].get_tensor(name).to(dtype)

    def card_source(self) -> CardSource:
        """Return tokenizer, template, EOS set and sampling defaults of the directory."""
        return read_card_source(self._path)

    def model_hash(self) -> str:
        """Return the digest of the weight files."""
        return hash_files(self._files)

    def _resolve_head(self, config: ModelConfig) -> ModelConfig:
        """Drop a head that only repeats the embedding; where a tied config meets another head, the files are right.

        That is what `transformers` does: such a checkpoint was trained with its head, and the config is out of date.
        """
        if not config.tie_embeddings or HEAD not in self._handles:
            return config
        if EMBEDDING in self._handles and self._repeats_embedding():
            del self._handles[HEAD]
            return config
        _log.warning(
            "%s: the config ties the head to the embedding, but %s differs from it; using %s and ignoring the tie",
            self._path,
            HEAD,
            HEAD,
        )
        return replace(config, tie_embeddings=False)

    def _repeats_embedding(self) -> bool:
        head, embedding = (self._handles[name].get_tensor(name) for name in (HEAD, EMBEDDING))
        return head.dtype == embedding.dtype and torch.equal(head, embedding)


def _shards(path: Path) -> dict[str, set[str] | None]:
    """Return the tensors to read by file name; None: all of the file's."""
    if (path / INDEX).is_file():
        return _indexed_shards(path / INDEX)
    if (path / SINGLE).is_file():
        return {SINGLE: None}
    raise ModelUnusable(f"{path}: holds neither {SINGLE} nor {INDEX} (other weight formats are not supported)")


def _indexed_shards(index: Path) -> dict[str, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelUnusable(f"{index}: has no weight_map")
    shards: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelUnusable(f"{index}: {name} is assigned to {json.dumps(file)}, not to a file beside it")
        shards[file].add(name)
    return dict(shards)


def _open_shard(file: Path, wanted: set[str] | None) -> dict[str, _Shard]:
    """Map `file` and return its handle for every tensor to be read from it."""
    try:
        handle: _Shard = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelUnusable(f"{file}: cannot be read ({error})") from error
    present = set(handle.keys())
    if wanted is None:
        wanted = present
    if missing := sorted(wanted - present):
        raise ModelUnusable(f"{file}: the index promises {missing[0]}, which is not in this file")
    if stray := sorted(present - wanted):
        _log.warning("%s: ignoring %d tensors that the index assigns elsewhere (%s, ...)", file, len(stray), stray[0])
    return {name: handle for name in wanted if not name.endswith(_DERIVED_SUFFIX)}


def _log_stray_files(path: Path, shards: Mapping[str, object]) -> None:
    if stray := sorted(file.name for file in path.glob("*.safetensors") if file.name not in shards):
        _log.warning("%s: ignoring weight files that do not belong to the model: %s", path, ", ".join(stray))


def _shape(path: Path, name: str, handle: _Shard) -> tuple[int, ...]:
    stored = handle.get_slice(name)
    if (dtype := stored.get_dtype()) not in _DTYPES:
        raise ModelUnusable(f"{path}: {name} is stored as {dtype}; only {_joined(_DTYPES)} are supported")
    return tuple(stored.get_shape())


def _joined(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
