"""Reads the geometry of a GGUF file of architecture "llama"."""

from collections.abc import Sequence

from common.errors import ModelUnusable
from common.model.config import SUPPORTED, ModelConfig, RopeConfig
from common.model.gguf_metadata import GgufMetadata
from common.model.llama3_rope import recover_llama3

ARCHITECTURE = "llama"


def read_gguf_config(
    metadata: GgufMetadata,
    *,
    has_head: bool,
    attention_bias: bool,
    mlp_bias: bool,
    rope_factors: Sequence[float] | None,
) -> ModelConfig:
    """Return the geometry; the arguments say what the tensor table holds, for the format has no keys for it.

    `rope_factors` are the numbers of "rope_freqs.weight": by how much each frequency is divided, [head_dim / 2].
    """
    architecture = metadata.require("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise ModelUnusable(f"{metadata.path}: architecture {architecture} is not supported; {SUPPORTED}")
    if metadata.get("llama.expert_count", int):
        raise ModelUnusable(f"{metadata.path}: mixtures of experts are not supported; {SUPPORTED}")
    hidden_size = metadata.require("llama.embedding_length", int)
    num_heads = metadata.require("llama.attention.head_count", int)
    head_dim = metadata.get("llama.attention.key_length", int) or hidden_size // max(num_heads, 1)
    return ModelConfig(
        architecture=ARCHITECTURE,
        num_layers=metadata.require("llama.block_count", int),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", int) or num_heads,
        head_dim=head_dim,
        intermediate_size=metadata.require("llama.feed_forward_length", int),
        vocab_size=_vocab_size(metadata),
        rms_norm_eps=metadata.require("llama.attention.layer_norm_rms_epsilon", float),
        rope=_rope(metadata, head_dim, rope_factors),
        max_context=metadata.require("llama.context_length", int),
        tie_embeddings=not has_head,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


def _vocab_size(metadata: GgufMetadata) -> int:
    declared = metadata.get("llama.vocab_size", int)
    return declared if declared is not None else len(metadata.require_list("tokenizer.ggml.tokens", str))


def _rope(metadata: GgufMetadata, head_dim: int, factors: Sequence[float] | None) -> RopeConfig:
    rotated = metadata.get("llama.rope.dimension_count", int)
    if rotated is not None and rotated != head_dim:
        raise ModelUnusable(f"{metadata.path}: rotating {rotated} of {head_dim} head dimensions is not supported")
    theta = metadata.get("llama.rope.freq_base", float) or 10000.0
    kind = metadata.get("llama.rope.scaling.type", str) or "none"
    if metadata.get("llama.rope.scale_linear", float) not in (None, 1.0):
        raise ModelUnusable(f"{metadata.path}: metadata key llama.rope.scale_linear is outdated; convert again")
    if factors is not None:
        return _llama3(metadata, theta, kind, head_dim, factors)
    match kind:
        case "none":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", metadata.require("llama.rope.scaling.factor", float))
        case _:
            raise ModelUnusable(f"{metadata.path}: rope type {kind} is not supported, only none, linear and llama3")


def _llama3(metadata: GgufMetadata, theta: float, kind: str, head_dim: int, factors: Sequence[float]) -> RopeConfig:
    is_plausible = kind == "none" and theta > 0 and len(factors) == head_dim // 2
    rope = recover_llama3(theta, factors) if is_plausible else None
    if rope is None:
        raise ModelUnusable(
            f"{metadata.path}: the rope factors in rope_freqs.weight (with scaling type {kind}) are not those of llama3"
        )
    return rope
