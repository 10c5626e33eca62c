"""Tiny random Llama checkpoints in Hugging Face format: a few hundred thousand fp32 weights, a working tokenizer.

Token ids: 0 "<|endoftext|>", 1 "<|im_start|>" (BOS), 2 "<|im_end|>" (end of turn), then the 256 bytes, then merges.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FREQUENT_LETTERS = "etaoinshrdlu"


def write_tiny_llama(
    path: Path,
    *,
    tie: bool = True,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    vocab: int = 320,
    rope_scaling: dict[str, Any] | None = None,
    rope_theta: float = 10000.0,
    max_position: int = 2048,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    shards: int = 1,
    seed: int = 0,
    eos: int | tuple[int, ...] = 2,
    config_eos: int | None = 2,
) -> Path:
    """Write a checkpoint into directory `path` (made if missing) and return it.

    `eos` goes into generation_config.json, `config_eos` into config.json (None: left out); the tokenizer's EOS is id 2.
    With `shards` > 1 the tensors are dealt round robin to files named by an index.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab must be at least {MIN_VOCAB}, got {vocab}")
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": 1,
        "torch_dtype": "float32",
    }
    if config_eos is not None:
        config["eos_token_id"] = config_eos
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos})
    write_tokenizer(path, vocab)
    write_weights(path, random_weights(config, seed), shards)
    return path


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of the JSON object in `path`; a value of None removes its key."""
    value = read_json(path) if path.exists() else {}
    value.update(changes)
    write_json(path, {key: item for key, item in value.items() if item is not None})


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return fp32 weights by canonical name, scaled so that logits are far from ties and greedy output varies."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random_tensor(name, shape, generator) for name, shape in _shapes(config).items()}


def write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {
        name: f"model-{position % shards + 1:05d}-of-{shards:05d}.safetensors" for position, name in enumerate(weights)
    }
    for file in sorted(set(weight_map.values())):
        part = {name: tensor for name, tensor in weights.items() if weight_map[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in weights.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(path: Path, vocab: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE with exactly `vocab` tokens."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = _merges(vocab - len(tokens))
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _merges(count: int) -> list[tuple[str, str]]:
    """Return `count` distinct merges: letter pairs, then pairs after a space, then pairs of any two bytes."""
    letters = [(a, b) for a in _FREQUENT_LETTERS for b in _FREQUENT_LETTERS]
    spaced = [("Ġ", a) for a in _FREQUENT_LETTERS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rest = ((a, b) for a in alphabet for b in alphabet)
    chosen: dict[tuple[str, str], None] = {}
    for pair in (*spaced, *letters, *rest):
        if len(chosen) == count:
            break
        chosen[pair] = None
    return list(chosen)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        attention["o_proj"] = (hidden, queries)
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for block, projections in (("self_attn", attention), ("mlp", mlp)):
            has_bias = config["attention_bias" if block == "self_attn" else "mlp_bias"]
            for name, shape in projections.items():
                shapes[f"{layer}{block}.{name}.weight"] = shape
                if has_bias:
                    shapes[f"{layer}{block}.{name}.bias"] = shape[:1]
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    if name == "model.embed_tokens.weight":
        return 0.3 * noise
    scale: float = 1.5 / shape[1] ** 0.5
    return noise * scale
