"""`/v1/models`: what is served."""

from typing import Literal

import msgspec


class ModelEntry(msgspec.Struct, frozen=True):
    """One model. `max_model_len` is its context in tokens (the name that vLLM's clients read)."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """All models."""

    object: Literal["list"]
    data: tuple[ModelEntry, ...]
