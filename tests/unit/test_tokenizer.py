"""Text to ids: BOS, special tokens, texts that cannot fit; and the bytes of single tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from common.errors import InvalidRequest, ModelUnusable
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import (
    BOS,
    EOS,
    SHOWN,
    byte_level_tokenizer,
    id_of,
    sentencepiece_tokenizer,
    tiny_card,
)

TOKENIZER = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
BOS_ID = id_of(TOKENIZER, BOS)
PLAIN = ModelTokenizer(tiny_card(TOKENIZER))
WITH_BOS = ModelTokenizer(tiny_card(TOKENIZER, add_bos=True))


def test_b099_a_plain_text_gets_one_bos() -> None:
    assert WITH_BOS.encode_text("hi") == [BOS_ID, *PLAIN.encode_text("hi")]
    assert BOS_ID not in PLAIN.encode_text("hi")


def test_b099_a_bos_that_is_there_is_not_doubled() -> None:
    assert WITH_BOS.encode_text(BOS + "hi") == WITH_BOS.encode_text("hi")


def test_b099_a_chat_template_writes_its_own() -> None:
    assert WITH_BOS.encode_chat(BOS + "hi") == WITH_BOS.encode_text("hi")
    assert BOS_ID not in WITH_BOS.encode_chat("hi")


def test_b019_empty_text_is_a_token_only_with_bos() -> None:
    assert WITH_BOS.encode_text("") == [BOS_ID]
    assert PLAIN.encode_text("") == []


def test_special_tokens_are_read_as_such() -> None:
    assert PLAIN.encode_chat(f"a{EOS}")[-1] == id_of(TOKENIZER, EOS)


def test_encoding_equals_the_librarys_own() -> None:
    text = "hello the 日本 é\n 12 " * 20
    assert PLAIN.encode_text(text) == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert PLAIN.decode(PLAIN.encode_text(text)) == text


def test_hopelessly_long_texts_are_refused_unread() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PLAIN.encode_text("x" * (64 * 256 + 1))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("changes", [{"tokenizer": b"x"}, {"add_bos": True, "bos_token": "<nobody>"}])
def test_cards_that_cannot_be_used(changes: dict[str, object]) -> None:
    with pytest.raises(ModelUnusable, match="tiny"):
        ModelTokenizer(tiny_card(TOKENIZER, **changes))


# The bytes of tokens


def wordpiece_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens begin a word unless they say otherwise."""
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "日": 3, BOS: 4, EOS: 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Return a tokenizer that marks spaces with a character of their own and has no byte tokens."""
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "日": 3, BOS: 4, EOS: 5}, [("▁", "a")]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (
            TOKENIZER,
            {
                "Ã©": "é".encode(),
                "é": b"\xe9",
                "Ġ": b" ",
                EOS: EOS.encode(),
                SHOWN: SHOWN.encode(),
                "æ": b"\xe6",
                "Ċ": b"\n",
            },
        ),
        (
            sentencepiece_tokenizer(),
            {"▁a": b" a", "a": b"a", "<0xE6>": b"\xe6", "日": "日".encode(), EOS: EOS.encode()},
        ),
        (wordpiece_tokenizer(), {"hello": b" hello", "##ing": b"ing", "日": " 日".encode(), EOS: EOS.encode()}),
        (metaspace_tokenizer(), {"▁a": b" a", "▁": b" ", "a": b"a", EOS: EOS.encode()}),
    ],
    ids=["byte-level", "sentencepiece", "wordpiece", "metaspace"],
)
def test_b009_the_bytes_of_a_token_are_what_it_adds_to_a_text(tokenizer: Tokenizer, expected: dict[str, bytes]) -> None:
    model = ModelTokenizer(tiny_card(tokenizer))
    assert {token: model.bytes_of(id_of(tokenizer, token)) for token in expected} == expected
    assert model.bytes_of(tokenizer.get_vocab_size() + 1) == b""


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@given(data=st.data())
def test_b009_the_bytes_of_all_tokens_are_the_text(name: str, data: st.DataObject) -> None:
    """Only the first space of a sentencepiece text is its own: decoders strip it."""
    tokenizer = {"byte-level": TOKENIZER, "sentencepiece": SENTENCEPIECE}[name]
    model = ModelTokenizer(tiny_card(tokenizer))
    text = data.draw(st.text("abch é日👩\n", max_size=20))
    ids = model.encode_text(text)
    told = b"".join(map(model.bytes_of, ids)).decode()
    assert told.removeprefix(" " if name == "sentencepiece" else "") == text


@pytest.mark.parametrize("tokenizer", [TOKENIZER, sentencepiece_tokenizer()], ids=["byte-level", "sentencepiece"])
def test_special_tokens_are_shown_if_wanted(tokenizer: Tokenizer) -> None:
    model = ModelTokenizer(tiny_card(tokenizer))
    ids = [id_of(tokenizer, "a"), id_of(tokenizer, EOS), id_of(tokenizer, "b")]
    for skips_special in (True, False):
        detokenizer = model.detokenizer(skips_special=skips_special)
        text = detokenizer.push(ids) + detokenizer.finish()
        assert text == model.decode(ids, skips_special=skips_special)
        assert (EOS in text) != skips_special
