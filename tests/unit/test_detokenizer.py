"""Text of token ids as they arrive."""

import pytest

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizer import (
    HIDDEN,
    SHOWN,
    byte_ids,
    byte_level_tokenizer,
    id_of,
    sentencepiece_tokenizer,
    tiny_card,
)

TOKENIZER = byte_level_tokenizer()
MODEL = ModelTokenizer(tiny_card(TOKENIZER))
COMPUTER_WOMAN = b"\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb"


def texts(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push([token_id]) for token_id in ids]


@pytest.mark.parametrize("text", ["日本", "é", COMPUTER_WOMAN.decode(), "a日b本cé" + COMPUTER_WOMAN.decode()])
def test_b008_one_byte_per_token(text: str) -> None:
    detokenizer = MODEL.detokenizer()
    pieces = texts(detokenizer, byte_ids(TOKENIZER, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def test_b008_two_interleaved_answers_do_not_mix() -> None:
    first, second = MODEL.detokenizer(), MODEL.detokenizer()
    shown_first = shown_second = ""
    for one, other in zip(byte_ids(TOKENIZER, "日本"), byte_ids(TOKENIZER, "éé é")[:6], strict=True):
        shown_first += first.push([one])
        shown_second += second.push([other])
    assert (shown_first, shown_second) == ("日本", "éé ")
    assert second.finish() == "\ufffd"


def test_b009_cut_in_the_middle_of_a_character() -> None:
    ids = byte_ids(TOKENIZER, "ab日")[:-1]
    detokenizer = MODEL.detokenizer()
    shown = "".join(texts(detokenizer, ids))
    assert shown == "ab"
    assert shown + detokenizer.finish() == "ab\ufffd" == TOKENIZER.decode(ids)


def test_b100_added_and_special_tokens() -> None:
    ids = TOKENIZER.encode(f"a{SHOWN}b{HIDDEN}c").ids
    detokenizer = MODEL.detokenizer()
    shown = "".join(texts(detokenizer, ids)) + detokenizer.finish()
    assert shown == "a<t>bc" == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert MODEL.detokenizer().push([TOKENIZER.get_vocab_size() + 5, id_of(TOKENIZER, "a")]) == "a"


def test_b008_byte_fallback_is_held_until_the_run_of_bytes_ends() -> None:
    tokenizer = sentencepiece_tokenizer()
    detokenizer = ModelTokenizer(tiny_card(tokenizer)).detokenizer()
    run = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "本".encode()]
    assert texts(detokenizer, run) == ["", "", ""]
    assert detokenizer.push([id_of(tokenizer, "a")]) == "本a"
