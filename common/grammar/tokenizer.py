"""The vocabulary of a model as llguidance wants it: the bytes of each token, and which tokens end an answer."""

import zlib
from collections.abc import Sequence

from llguidance import LLTokenizer

from common.errors import ModelUnusable


def grammar_tokenizer(tokenizer: bytes, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer of the fields that a model card has under these names.

    Holds the GIL all the time: 0.2 s for 49,152 tokens, which then take 40 MB. Raises `ModelUnusable`.
    """
    ends = [token for token in eos_ids if 0 <= token < vocab_size]
    if not ends:
        raise ModelUnusable("no token ends an answer of this model, so no grammar can be completed")
    try:
        text = zlib.decompress(tokenizer).decode()
        return _fitted(text, vocab_size, ends)
    except (ValueError, zlib.error) as error:
        raise ModelUnusable(f"the tokenizer cannot follow grammars: {error}") from error


def _fitted(text: str, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """Rows of logits may be more than tokens, whose masks then have no bits for them; they may also be fewer."""
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError:
        return LLTokenizer(text, eos_token=ends)
