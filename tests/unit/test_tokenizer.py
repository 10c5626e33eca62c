"""Text to ids: BOS, special tokens, texts that cannot fit."""

import pytest

from common.errors import InvalidRequest, ModelUnusable
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import BOS, EOS, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
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
