"""The weights of a checkpoint as `transformers` reads them, and how ours are compared with them."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common.model.checkpoint import Checkpoint

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def reference_weights(path: Path) -> dict[str, torch.Tensor]:
    """What `transformers` computes with, without the alias of a tied head."""
    model = AutoModelForCausalLM.from_pretrained(path)
    weights = dict(model.state_dict())
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del weights[HEAD]
    return weights


def assert_same_weights(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert checkpoint.names() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), tensor), name
