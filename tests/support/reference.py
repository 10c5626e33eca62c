"""What `transformers` generates greedily in fp32 for the bundled model: the truth that every topology must repeat."""

import functools
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.model.locate import locate_model

EOS_ID = 2


@dataclass(frozen=True)
class Answer:
    """Generated ids without the end-of-turn token, and whether that token ended them."""

    ids: tuple[int, ...]
    is_stopped: bool


@functools.cache
def _model() -> PreTrainedModel:
    path = locate_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


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
