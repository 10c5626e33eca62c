"""The model that all sides serve: a Hugging Face directory in bf16, made once of the checkpoint that Tandem loads.

So nobody has other numbers: the peers, and Tandem too, read the same files.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.checkpoint import Checkpoint, open_checkpoint
from common.model.config import ModelConfig
from common.model.locate import locate_model

DTYPE = "bfloat16"


def write_weights(name_or_path: str, cache: Path) -> Path:
    """Return the directory in `cache` that holds the model in bf16, written if it is not there.

    Raises `ModelUnusable` for a model that is not found, or whose rotary embedding is not the plain one.
    """
    checkpoint = open_checkpoint(locate_model(name_or_path))
    folder = cache / f"weights-{checkpoint.model_hash()[:16]}-{DTYPE}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    source = checkpoint.card_source()
    _write_json(unfinished / "config.json", _config(checkpoint.config, source))
    _write_json(unfinished / "generation_config.json", {"eos_token_id": list(source.eos_ids)})
    _write_text(unfinished, source)
    save_file(_tensors(checkpoint), unfinished / "model.safetensors", metadata={"format": "pt"})
    return unfinished.rename(folder)


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    dtype: torch.dtype = getattr(torch, DTYPE)
    return {name: checkpoint.tensor(name, dtype).contiguous() for name in sorted(checkpoint.names())}


def _config(config: ModelConfig, source: CardSource) -> dict[str, Any]:
    if config.rope.kind != "default":
        raise ModelUnusable(f"a rotary embedding of kind {config.rope.kind} is not written for peers")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": None,
        "eos_token_id": list(source.eos_ids),
        "torch_dtype": DTYPE,
    }


def _write_text(folder: Path, source: CardSource) -> None:
    """Write the tokenizer, and the chat template if there is one."""
    (folder / "tokenizer.json").write_text(source.tokenizer_json, encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    named = {"bos_token": source.bos_token, "eos_token": source.eos_token, "chat_template": source.chat_template}
    settings.update({name: text for name, text in named.items() if text})
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
