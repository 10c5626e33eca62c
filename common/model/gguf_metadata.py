"""The key-value part of a GGUF file, read with types: a missing or mistyped key is a `ModelUnusable` that names it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from common.errors import ModelUnusable

ValueT = TypeVar("ValueT", str, int, float, bool)


class GgufMetadata:
    """`path` is for messages; `values` holds strings, numbers, booleans and lists of them."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, kind: type[ValueT]) -> ValueT | None:
        """Return the value of `key`, or None if the file has no such key."""
        value = self._values.get(key)
        return None if value is None else self._checked(key, value, kind)

    def require(self, key: str, kind: type[ValueT]) -> ValueT:
        """Return the value of `key`."""
        value = self.get(key, kind)
        if value is None:
            raise ModelUnusable(f"{self.path}: metadata key {key} is missing")
        return value

    def require_list(self, key: str, kind: type[ValueT]) -> list[ValueT]:
        """Return the list under `key`."""
        values = self._values.get(key)
        if not isinstance(values, list):
            raise ModelUnusable(f"{self.path}: metadata key {key} is missing or not a list")
        return [self._checked(key, value, kind) for value in values]

    def _checked(self, key: str, value: object, kind: type[ValueT]) -> ValueT:
        if type(value) is not kind:
            raise ModelUnusable(f"{self.path}: metadata key {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value
