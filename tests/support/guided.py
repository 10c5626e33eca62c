"""Grammars for tests of guided answers, and answers drawn at random within them."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from common.messages.ids import ChoiceIndex, PlacementNumber, RequestId
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams
from common.runtime.grammar_masks import GrammarMasks
from common.runtime.grammars import Grammars
from common.scheduling.sequence import Sequence, SequenceKey
from gateway.guidance.source import JsonSchema, Regex
from gateway.guidance.text import grammar_text
from kernels.sampling.op import NoToken, sample
from kernels.sampling.row import SamplingRow

WORD_BITS = 32
PROMPT = (1, 2, 3)


def loaded(card: ModelCard) -> Grammars:
    """Return the grammars of a worker that has loaded this card's vocabulary."""
    grammars = Grammars(card)
    grammars.load()
    assert grammars.num_tokens
    return grammars


def schema_text(schema: Any) -> str:
    """Return the grammar of a JSON schema."""
    return grammar_text(JsonSchema(json.dumps(schema)))


def regex_text(pattern: str) -> str:
    """Return the grammar of a regular expression."""
    return grammar_text(Regex(pattern))


def guided_sequence(grammar: str | None, generated: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    """Return a sequence that has generated these tokens."""
    params = SamplingParams(seed=1, max_tokens=1000, grammar=grammar, **sampling)
    key = SequenceKey(RequestId("r"), PlacementNumber(1), choice=ChoiceIndex(0))
    return Sequence(key, [*PROMPT, *generated], len(PROMPT), params, arrival=0)


def allowed_ids(masks: GrammarMasks, sequence: Sequence) -> list[int]:
    """Return the tokens that may come next."""
    words = masks.allowed(sequence)
    assert words is not None
    return [
        WORD_BITS * place + bit
        for place, word in enumerate(words.tolist())
        for bit in range(WORD_BITS)
        if word >> bit & 1
    ]


def drawn(masks: GrammarMasks, sequence: Sequence, vocab_size: int, *, seed: int) -> Iterator[int | NoToken]:
    """Yield tokens drawn from random logits, each behind those before it, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        logits = 3 * torch.randn(1, vocab_size, generator=generator)
        row = SamplingRow(sequence.token_ids, sequence.num_prompt, sequence.sampling, allowed=masks.allowed(sequence))
        (token,) = sample(logits, [row])
        yield token
        if isinstance(token, int):
            sequence.token_ids.append(token)
