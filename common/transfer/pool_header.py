"""The first bytes of a pool's memory: how a peer that maps it finds its way, and what it checks before it trusts it.

Memory of a pool: header, then one generation (uint64) per block, then the pages, which start on a machine page.
"""

import struct
from dataclasses import dataclass

from common.errors import MalformedRecord
from common.messages.ids import Epoch

GENERATIONS_OFFSET = 64
_GENERATION_BYTES = 8
_MACHINE_PAGE_BYTES = 4096
_MAGIC = b"tandemKV"
_VERSION = 1
_LAYOUT = struct.Struct("<8sQQQQ")


@dataclass(frozen=True, slots=True)
class PoolHeader:
    """Who owns the pool and its geometry. `page_bytes` must be equal on both ends, `num_blocks` need not."""

    epoch: Epoch
    page_bytes: int
    num_blocks: int

    @property
    def pages_offset(self) -> int:
        """Where page 0 starts, in bytes."""
        end = GENERATIONS_OFFSET + self.num_blocks * _GENERATION_BYTES
        return -(-end // _MACHINE_PAGE_BYTES) * _MACHINE_PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the whole memory."""
        return self.pages_offset + self.num_blocks * self.page_bytes

    @property
    def generations_slice(self) -> slice:
        """Bytes of the generation table."""
        return slice(GENERATIONS_OFFSET, GENERATIONS_OFFSET + self.num_blocks * _GENERATION_BYTES)

    @property
    def pages_slice(self) -> slice:
        """Bytes of all pages."""
        return slice(self.pages_offset, self.total_bytes)

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _LAYOUT.pack(_MAGIC, _VERSION, self.epoch, self.page_bytes, self.num_blocks)

    @classmethod
    def unpack(cls, data: bytes) -> "PoolHeader":
        """Return the header at the start of `data`; raise `MalformedRecord` if there is none that we understand."""
        if len(data) < _LAYOUT.size:
            raise MalformedRecord("pool header", f"only {len(data)} bytes")
        magic, version, epoch, page_bytes, num_blocks = _LAYOUT.unpack_from(data)
        if magic != _MAGIC:
            raise MalformedRecord("pool header", "wrong magic")
        if version != _VERSION:
            raise MalformedRecord("pool header", f"version {version}, not {_VERSION}")
        return cls(Epoch(epoch), page_bytes, num_blocks)
