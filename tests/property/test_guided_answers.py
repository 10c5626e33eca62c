"""Whatever a model prefers, a guided answer ends, is JSON, and matches its schema, in every kind of vocabulary."""

import json
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard
from common.model.card import build_card
from common.model.checkpoint import open_checkpoint
from common.runtime.grammar_masks import GrammarMasks
from common.runtime.grammars import Grammars
from gateway.tokenizer import ModelTokenizer
from tests.support.guided import drawn, guided_sequence, loaded, schema_text
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_llama
from tests.support.tiny_tokenizer import byte_level_tokenizer, sentencepiece_tokenizer, tiny_card

MAX_TOKENS = 3000
"""More than the longest answer of these schemas, were it written byte by byte with all the white space there may be."""


def byte_level() -> ModelCard:
    return tiny_card(byte_level_tokenizer(), vocab_size=300)


def sentencepiece() -> ModelCard:
    return tiny_card(sentencepiece_tokenizer())


@cache
def from_gguf() -> ModelCard:
    with TemporaryDirectory() as folder:
        source = write_tiny_llama(Path(folder) / "hf")
        file = write_tiny_gguf(Path(folder) / "model.gguf", source)
        return build_card(
            open_checkpoint(file),
            model=ModelName("tiny"),
            fingerprint=Fingerprint("f" * 64),
            max_context=2048,
            created=1,
        )


@lru_cache
def vocabulary(make_card: Callable[[], ModelCard]) -> tuple[ModelCard, Grammars, ModelTokenizer]:
    card = make_card()
    return card, loaded(card), ModelTokenizer(card)


NAMES = st.sampled_from(["a", "bee", "né", "日本", 'q"uote', "sp ace", "x/y", "\U0001f600"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), NAMES)
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 300),
    ),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 6)),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(["^[a-c]{2}$", "^(é|日)\\d?$", "^$"])
    ),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4, unique_by=json.dumps)),
    st.builds(lambda kind: {"type": "string", "format": kind}, st.sampled_from(["date", "time", "ipv4", "uuid"])),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        objects(inner),
        st.builds(lambda items, size: {"type": "array", "items": items, "maxItems": size}, inner, st.integers(0, 3)),
        st.builds(lambda *kinds: {"anyOf": list(kinds)}, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=5)


@pytest.mark.parametrize("make_card", [byte_level, sentencepiece, from_gguf])
@settings(max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_a_guided_answer_matches_its_schema(make_card: Callable[[], ModelCard], schema: Any, seed: int) -> None:
    card, grammars, tokenizer = vocabulary(make_card)
    sequence = guided_sequence(schema_text(schema), stop_ids=card.eos_ids, temperature=1.0)
    answer: list[int] = []
    for token in drawn(GrammarMasks(grammars), sequence, card.vocab_size, seed=seed):
        assert isinstance(token, int), token
        if token in card.eos_ids:
            break
        answer.append(token)
        assert len(answer) < MAX_TOKENS
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.push((token,)) for token in answer) + detokenizer.finish()
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text
