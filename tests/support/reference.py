"""What `transformers` generates greedily in fp32 for the bundled model: the truth that every topology must repeat."""

import functools
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.model.checkpoint import open_checkpoint
from common.model.locate import locate_model

EOS_ID = 2


@dataclass(frozen=True)
class Answer:
    """Generated ids without the end-of-turn token, and whether that token ended them."""

    ids: tuple[int, ...]
    is_stopped: bool


@functools.cache
def _model() -> LlamaForCausalLM:
    """Build it from the dequantised tensors, which `test_checkpoint` compares with those `transformers` reads."""
    checkpoint = open_checkpoint(locate_model("smollm2"))
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_embeddings,
            dtype=torch.float32,
        )
    )
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    model.eval()
    return model


def generate(prompt_ids: list[int], max_tokens: int) -> Answer:
    """Return the greedy continuation."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = _model().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
    generated = output[0, len(prompt_ids) :].tolist()
    is_stopped = bool(generated) and generated[-1] == EOS_ID
    return Answer(tuple(generated[:-1] if is_stopped else generated), is_stopped)
