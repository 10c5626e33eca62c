"""A checkpoint: model files of any kind behind one face, with Hugging Face tensor names."""

from pathlib import Path
from typing import Protocol

import torch

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.config import ModelConfig
from common.model.gguf_file import GgufFile


class Checkpoint(Protocol):
    """Opened and checked: every parameter of `config` is there, with its shape, and nothing unknown is."""

    @property
    def config(self) -> ModelConfig:
        """Geometry of the model."""

    def names(self) -> frozenset[str]:
        """Return the names of all parameters; "lm_head.weight" only if the head is not tied to the embedding."""

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter on the CPU, [out_features, in_features] if it is a matrix.

        It is a view of the mapped file where the file holds just these numbers, so do not write into it. Raises
        `KeyError` for a name not in `names()`.
        """

    def card_source(self) -> CardSource:
        """Return what the files say about text; raise `ModelUnusable` if that is not enough to serve it."""

    def model_hash(self) -> str:
        """Return a hex digest that differs when the weights differ (see `content_hash` for large files)."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory; raise `ModelUnusable` if it is neither, damaged or unsupported."""
    if path.is_file():
        return GgufFile(path)
    if path.is_dir():
        # Here, not above: it imports transformers (1.6 s), which GGUF files do not need.
        from common.model.hf_directory import HfDirectory

        return HfDirectory(path)
    raise ModelUnusable(f"{path}: no such file or directory")
