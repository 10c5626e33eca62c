"""Geometry of a paged KV cache: how many bytes a page has and what must be equal on both ends of a hand-over."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Block-major layout `[block][layer][K|V][kv_head][token][head_dim]`: one page is one contiguous span of bytes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """"float32", "bfloat16" or "float16"."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
