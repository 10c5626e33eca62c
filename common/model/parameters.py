"""Which tensors a Llama-family model consists of, under their Hugging Face names, and whether a file holds them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import ModelUnusable
from common.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_MAX_NAMED = 4

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter; projections are [out_features, in_features]."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes |= _layer_shapes(config, f"model.layers.{index}.")
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def check_parameters(path: Path, found: Mapping[str, Shape], config: ModelConfig) -> None:
    """Raise `ModelUnusable` naming the tensors of `path` that are missing, unknown or of another shape."""
    _refuse_impossible(path, config)
    if config.num_layers > len(found):  # before making up millions of names for a damaged number
        raise ModelUnusable(f"{path}: {config.num_layers} layers, but only {len(found)} tensors")
    expected = parameter_shapes(config)
    if missing := expected.keys() - found.keys():
        raise ModelUnusable(f"{path}: missing {_listed(missing)}")
    if unknown := found.keys() - expected.keys():
        raise ModelUnusable(f"{path}: the model has no place for {_listed(unknown)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelUnusable(f"{path}: {name} has shape {list(found[name])}, expected {list(shape)}")


def _refuse_impossible(path: Path, config: ModelConfig) -> None:
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for name in (*sizes, "max_context"):
        if getattr(config, name) < 1:
            raise ModelUnusable(f"{path}: {name} is {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelUnusable(
            f"{path}: {config.num_heads} heads of {config.head_dim} cannot share {config.num_kv_heads} key-value heads"
        )
    if not (config.rope.theta > 0 and config.rope.factor > 0 and config.rms_norm_eps >= 0):
        raise ModelUnusable(f"{path}: rope {config.rope.theta:g} / {config.rope.factor:g} is not positive")


def _layer_shapes(config: ModelConfig, layer: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, Shape] = {
        f"{layer}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for block, projections, has_bias in (
        ("self_attn", attention, config.attention_bias),
        ("mlp", mlp, config.mlp_bias),
    ):
        for projection, (num_out, num_in) in projections.items():
            shapes[f"{layer}{block}.{projection}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{layer}{block}.{projection}.bias"] = (num_out,)
    return shapes


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _MAX_NAMED
    return ", ".join(ordered[:_MAX_NAMED]) + (f" and {rest} more tensors" if rest > 0 else "")
