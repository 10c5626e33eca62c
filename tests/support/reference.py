"""What `transformers` generates greedily in fp32 for the bundled model: the truth that every topology must repeat."""

import functools
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common.model.checkpoint import open_checkpoint
from common.model.locate import locate_model

EOS_ID = 2


@dataclass(frozen=True)
class Answer:
    """Generated ids without the end-of-turn token, and whether that token ended them."""

    ids: tuple[int, ...]
    is_stopped: bool


@functools.cache
def bundled_model() -> LlamaForCausalLM:
    """Build it from the dequantised tensors, which `test_gguf_checkpoint` compares with those `transformers` reads."""
    checkpoint = open_checkpoint(locate_model("smollm2"))
    ours = checkpoint.config
    config = LlamaConfig(
        num_hidden_layers=ours.num_layers,
        hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        intermediate_size=ours.intermediate_size,
        vocab_size=ours.vocab_size,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
        max_position_embeddings=ours.max_context,
        tie_word_embeddings=ours.tie_embeddings,
    )
    with torch.device("meta"):  # weights that would be replaced at once are not initialised
        model: LlamaForCausalLM = LlamaForCausalLM(config)
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    missing = model.load_state_dict(weights, strict=False, assign=True).missing_keys
    assert missing == (["lm_head.weight"] if ours.tie_embeddings else [])
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # holds a buffer that no checkpoint has
    model.tie_weights()
    model.eval()
    return model


def logprobs(token_ids: list[int]) -> torch.Tensor:
    """Return the logprobs [num_tokens, vocab] fp64 of the token behind each of these."""
    with torch.inference_mode():
        logits: torch.Tensor = bundled_model()(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(-1)


def generate(prompt_ids: list[int], max_tokens: int) -> Answer:
    """Return the greedy continuation."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = bundled_model().generate(
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
