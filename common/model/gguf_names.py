"""Translates the tensor names of GGUF files of architecture "llama" to Hugging Face names."""

import re

ROPE_FACTORS = "rope_freqs.weight"

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


def canonical_name(name: str) -> str | None:
    """Return the Hugging Face name of GGUF tensor `name`, or None if a Llama has no such tensor."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    layer, module, kind = parts["layer"], parts["module"], parts["kind"]
    target = _OUTER.get(module) if layer is None else _INNER.get(module)
    if target is None:
        return None
    return f"{target}.{kind}" if layer is None else f"model.layers.{layer}.{target}.{kind}"
