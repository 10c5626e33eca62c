"""Reads the header of a GGUF file: the key-value part and the table of tensors (versions 2 and 3, little-endian).

Format: the GGUF specification of the ggml project; lists of lists, which it allows and nobody writes, are refused.
`gguf.GGUFReader` reads the same, but makes several array objects for every string: 2.1 s for the 100,000 strings of a
small tokenizer, against 0.1 s here.
"""

import struct
from dataclasses import dataclass
from math import prod

from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes by value type."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `shape` has the contiguous dimension last, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor as stored."""
        block_elements, block_bytes = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // block_elements * block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`values` holds strings, numbers, booleans and lists of them."""

    values: dict[str, object]
    tensors: tuple[TensorEntry, ...]


def read_header(data: memoryview) -> GgufHeader:
    """Return the header of the file in `data`; raise `ValueError` if it is damaged or shorter than it promises."""
    cursor = _Cursor(data)
    try:
        if bytes(data[:4]) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor.offset = len(_MAGIC)
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported (or the file is big-endian)")
        num_tensors, num_values = int(cursor.number("Q")), int(cursor.number("Q"))
        values = {cursor.text(): cursor.value(int(cursor.number("I"))) for _ in range(num_values)}
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
    except struct.error as error:
        raise ValueError("it ends within its header") from error
    return GgufHeader(values, _placed(entries, _data_start(cursor.offset, values), len(data)))


class _Cursor:
    """Reads values one after another; raises `struct.error` or `ValueError` at the end of the data."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def number(self, code: str) -> int | float | bool:
        """Return one scalar of `struct` code `code`."""
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> list[int | float | bool]:
        """Return `count` scalars."""
        size = count * struct.calcsize(code)
        if size > len(self._data) - self.offset:
            raise ValueError("it ends within its header")
        values = struct.unpack_from(f"<{count}{code}", self._data, self.offset)
        self.offset += size
        return list(values)

    def text(self) -> str:
        """Return one string."""
        (size,) = struct.unpack_from("<Q", self._data, self.offset)
        start = self.offset + 8
        self.offset = start + size
        if self.offset > len(self._data):
            raise ValueError("it ends within its header")
        return str(self._data[start : self.offset], "utf-8")

    def value(self, kind: int) -> object:
        """Return one value of type `kind`."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self.number(_scalar_code(kind))

    def _array(self) -> list[object]:
        kind, count = int(self.number("I")), int(self.number("Q"))
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        return [*self.numbers(_scalar_code(kind), count)]


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind} is unknown")
    return _SCALARS[kind]


def _read_entry(cursor: _Cursor) -> TensorEntry:
    """Return the next entry of the tensor table; its offset still counts from the start of the tensor data."""
    name = cursor.text()
    dimensions = cursor.numbers("Q", int(cursor.number("I")))
    kind = GGMLQuantizationType(int(cursor.number("I")))
    shape = tuple(int(size) for size in reversed(dimensions))
    if not shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise ValueError(f"{name} of type {kind.name} cannot have shape {list(shape)}")
    return TensorEntry(name, shape, kind, int(cursor.number("Q")))


def _data_start(offset: int, values: dict[str, object]) -> int:
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment} is not a power of two")
    return -(-offset // alignment) * alignment


def _placed(entries: list[TensorEntry], start: int, num_bytes: int) -> tuple[TensorEntry, ...]:
    placed = [TensorEntry(entry.name, entry.shape, entry.kind, start + entry.offset) for entry in entries]
    if len({entry.name for entry in placed}) != len(placed):
        raise ValueError("it names a tensor twice")
    for entry in placed:
        if entry.offset + entry.num_bytes > num_bytes:
            raise ValueError(f"it ends within {entry.name}")
    return tuple(placed)
