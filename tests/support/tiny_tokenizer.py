"""Small real tokenizers and the model cards around them: every path of encoding and decoding, no files."""

import zlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard

BOS = "<|bos|>"
EOS = "<|im_end|>"
START = "<|im_start|>"
HIDDEN = "<|x|>"
SHOWN = "<t>"
"""Added, but not special: it is text."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGED = ("he", "ll", "hell", "hello", "AB", "CD", "EF", "GH", "in", "th", "the", "é", "日", "日本")


def byte_level_tokenizer() -> Tokenizer:
    """Return byte-level BPE: ids 0..255 are the byte symbols, then a few merges, then the added tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [pair for word in MERGED for pair in _merges_of(word)]
    words = [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate([*symbols, *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, START, EOS, HIDDEN)])
    tokenizer.add_tokens([AddedToken(SHOWN, special=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return BPE with byte fallback, as Llama 2 has it: the byte tokens, a few letters, one decoder that strips."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b", "日"]
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS)])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that exists."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per UTF-8 byte of `text`."""
    return [id_of(tokenizer, symbol) for symbol in _symbols_of(text)]


def tiny_card(source: Tokenizer | None = None, /, **changes: Any) -> ModelCard:
    """Return a card of model "tiny" with a context of 64 tokens; keyword arguments replace fields."""
    tokenizer = source or byte_level_tokenizer()
    fields: dict[str, Any] = {
        "model": ModelName("tiny"),
        "fingerprint": Fingerprint("f" * 64),
        "tokenizer": zlib.compress(tokenizer.to_str().encode()),
        "vocab_size": tokenizer.get_vocab_size(),
        "max_context": 64,
        "eos_ids": (id_of(tokenizer, EOS),),
        "created": 1_700_000_000,
        "chat_template": CHAT_TEMPLATE,
        "bos_token": BOS,
        "eos_token": EOS,
    }
    return ModelCard(**(fields | changes))


def _merges_of(word: str) -> list[tuple[str, str]]:
    """Return merges that build `word` from its first byte on."""
    symbols = _symbols_of(word)
    pairs, left = [], symbols[0]
    for right in symbols[1:]:
        pairs.append((left, right))
        left += right
    return pairs


def _symbols_of(word: str) -> str:
    """Return one symbol per byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)
    return "".join(piece for piece, _ in pieces)
