"""Reads the geometry of a Hugging Face directory through `transformers.AutoConfig`: local files, no remote code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from common.errors import ModelUnusable
from common.model.config import SUPPORTED, ModelConfig, RopeConfig

ARCHITECTURE = "LlamaForCausalLM"

_CONFIG_ERRORS = (StrictDataclassError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What the library raises, in the experience of the tests, on values that make no sense."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `ModelUnusable` if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelUnusable(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelUnusable(f"{path}: not a JSON object")
    return value


def read_hf_config(path: Path) -> ModelConfig:
    """Return the geometry of the model in directory `path`; raise `ModelUnusable` naming what is not supported.

    `tie_embeddings` is what the config says; the files may know better.
    """
    raw = read_json(path / "config.json")
    _refuse_unsupported(path, raw)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return ModelConfig(
            architecture=ARCHITECTURE,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            rope=_rope(path, config.rope_parameters),
            max_context=config.max_position_embeddings,
            tie_embeddings=_is_tied(raw, default=config.tie_word_embeddings),
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )
    except _CONFIG_ERRORS as error:
        raise ModelUnusable(f"{path / 'config.json'}: not a usable Llama config ({_one_line(error)})") from error


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    family = raw.get("model_type", "unnamed")
    names = raw.get("architectures") or [ARCHITECTURE]
    if names != [ARCHITECTURE] or family != "llama":
        kind = ", ".join(map(str, raw.get("architectures") or [])) or "of unnamed architecture"
        raise ModelUnusable(f"{path}: {kind} (model type {family}) is not supported; {SUPPORTED}")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelUnusable(f"{path}: weights quantised with {method} are not supported")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelUnusable(f"{path}: activation {activation} is not supported, only silu")


def _is_tied(raw: Mapping[str, Any], *, default: bool) -> bool:
    """A nested text config is the model's own and decides; the outer level may speak of another part."""
    text = raw.get("text_config")
    nested = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return default if nested is None else bool(nested)


def _rope(path: Path, parameters: Mapping[str, Any]) -> RopeConfig:
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelUnusable(f"{path}: a partial rotary embedding is not supported")
    theta = float(parameters["rope_theta"])
    match parameters["rope_type"]:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", float(parameters["factor"]))
        case "llama3":
            return RopeConfig(
                theta,
                "llama3",
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(parameters["original_max_position_embeddings"]),
            )
        case kind:
            raise ModelUnusable(f"{path}: rope type {kind} is not supported, only default, linear and llama3")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
