"""Tiny GGUF files made from tiny Hugging Face directories, the way conversion scripts lay them out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.numpy import load_file

from tests.support.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, read_json

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_tiny_gguf(
    path: Path,
    source: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: Sequence[float] | None = None,
    changes: Mapping[str, Any] | None = None,
    token_types: Mapping[str, int] | None = None,
    extra_tensors: Sequence[str] = (),
) -> Path:
    """Write the model in directory `source` (one shard) as GGUF file `path`, matrices quantised as `kind`.

    `changes` sets metadata keys, a value of None leaves a key out; `token_types` overrides types by token.
    """
    config = read_json(source / "config.json")
    writer = GGUFWriter(path, "llama")
    metadata = {**_geometry(config), **_tokenizer(source, token_types or {}), **(changes or {})}
    architecture = metadata.pop("general.architecture", "llama")
    if architecture != "llama":
        writer.kv_data[0]["general.architecture"].value = architecture
    for key, value in metadata.items():
        _add_value(writer, key, value)
    for name, values in load_file(source / "model.safetensors").items():
        _add_tensor(writer, *_converted(name, values, config), kind)
    if rope_factors is not None:
        _add_tensor(writer, "rope_freqs.weight", np.array(rope_factors, dtype=np.float32), kind)
    for name in extra_tensors:
        _add_tensor(writer, name, np.zeros(4, dtype=np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _geometry(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.attention.key_length": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
    }


def _tokenizer(source: Path, overrides: Mapping[str, int]) -> dict[str, Any]:
    model = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = dict.fromkeys(tokens, NORMAL) | dict.fromkeys(SPECIAL_TOKENS, CONTROL) | dict(overrides)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [types[token] for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: cannot write a {type(value).__name__}")


def _converted(name: str, values: np.ndarray[Any, Any], config: Mapping[str, Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Return GGUF name and values; rows of queries and keys move from halves to pairs."""
    for module, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{module}." in name:
            halves = values.reshape(config[heads], 2, config["head_dim"] // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_MODULES[stem]}.{kind}", values
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_MODULES[module]}.{kind}", values


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
