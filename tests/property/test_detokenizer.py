"""Incremental decoding equals whole decoding, for every sequence of ids and every cut.

Kills the planted bugs half-characters-shown and tail-forgotten.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, sentencepiece_tokenizer, tiny_card

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
}
MODELS = {name: ModelTokenizer(tiny_card(tokenizer)) for name, tokenizer in TOKENIZERS.items()}
SPECIAL = {
    name: [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    for name, tokenizer in TOKENIZERS.items()
}

MULTIBYTE = [*"日本é👩💻\u200d", *"ab ", "\ufffd"]


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    borders = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    edges = [0, *borders, len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def stream(model: ModelTokenizer, pushes: list[list[int]], shown: frozenset[str] = frozenset()) -> list[str]:
    detokenizer = model.detokenizer(shown=shown)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_b008_any_ids_any_cut(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    assert "".join(stream(MODELS[name], cut(ids, data))) == whole(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_special_tokens_that_are_wanted_are_shown_and_no_others(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    eos = id_of(tokenizer, EOS)
    some_id = st.integers(0, tokenizer.get_vocab_size() + 2) | st.sampled_from(SPECIAL[name])
    ids = data.draw(st.lists(some_id, max_size=40))
    text = "".join(stream(MODELS[name], cut(ids, data), frozenset({EOS, "ab"})))
    kept = [token_id for token_id in ids if token_id == eos or token_id not in SPECIAL[name]]
    assert text == tokenizer.decode(kept, skip_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_b008_characters_split_into_byte_tokens(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(MULTIBYTE), max_size=20)))
    if name == "byte-level":
        ids = byte_ids(TOKENIZERS[name], text)
    else:
        ids = [id_of(TOKENIZERS[name], f"<0x{byte:02X}>") for byte in text.encode()]
    pushes = [[token_id] for token_id in ids]
    texts = stream(MODELS[name], pushes)
    assert "".join(texts) == whole(TOKENIZERS[name], ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in texts)
