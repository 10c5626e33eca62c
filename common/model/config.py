"""What a model is: geometry, rotary embedding and limits, independent of the kind of file it came from.

Pure values, safe to import anywhere; `hf_config` and `gguf_config` read them from files.
"""

from dataclasses import dataclass
from typing import Literal

from common.cache.layout import KVLayout

SUPPORTED = "supported today: LlamaForCausalLM from Hugging Face directories, architecture 'llama' from GGUF files"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, stretched by `kind`.

    `factor` matters for "linear" and "llama3"; the fields after it for "llama3" alone. `original_max_position` is in
    tokens.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder.

    `tie_embeddings`: the head is the embedding matrix and no "lm_head.weight" exists. `attention_bias` covers the
    projections q, k, v and o, `mlp_bias` gate, up and down. `max_context` is in tokens.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    tie_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """Return the layout of this model's pages; `dtype` as in `KVLayout`."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)
