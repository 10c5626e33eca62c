"""The tokenizer of one model, as its workers published it: text to ids, ids to text.

Special tokens inside a text are read as such, like Hugging Face does for chats. BOS is added to plain texts only: a
chat template writes its own.
"""

import json
import zlib
from collections.abc import Sequence

from tokenizers import Tokenizer, pre_tokenizers

from common.errors import InvalidRequest, ModelUnusable
from common.messages.registry import ModelCard
from gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

MAX_CHARS_PER_TOKEN = 256
"""Longest tokens of the known vocabularies are runs of 128 spaces; a text that is longer than this times the context
is refused before it costs seconds of tokenising."""

NUM_BYTE_SYMBOLS = 256


class ModelTokenizer:
    """Encoding and decoding for one model. May be used from several threads; encoding releases the GIL."""

    def __init__(self, card: ModelCard) -> None:
        """Unpack the card's tokenizer; raises `ModelUnusable`."""
        try:
            self._tokenizer = Tokenizer.from_buffer(zlib.decompress(card.tokenizer))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelUnusable(f"the tokenizer of model {card.model} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._bos_id = _bos_id(self._tokenizer, card)
        self._max_chars = card.max_context * MAX_CHARS_PER_TOKEN
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._has_byte_tokens = _decoder_kind(self._tokenizer) == "ByteLevel"
        self._bytes_by_id: dict[int, bytes] = {}

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a rendered chat template."""
        return self._encode(text, param="messages")

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a plain text behind one BOS, if the model wants one; a BOS that is there is not doubled."""
        ids = self._encode(text, param="prompt")
        if self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole answer, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """Return the state for one answer."""
        if self._has_byte_tokens:
            return ByteDetokenizer(self._bytes_of)
        return WindowDetokenizer(self.decode, is_shown=self._is_shown, is_byte=self._is_byte)

    def _encode(self, text: str, param: str) -> list[int]:
        if len(text) > self._max_chars:
            raise InvalidRequest(
                f"The prompt's {len(text)} characters cannot fit the model's context.",
                param=param,
                code="context_length_exceeded",
            )
        # The batch call, unlike `encode`, releases the GIL: 1.3 MB took 0.5 s, in which other threads ran.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._bytes_by_id.get(token_id)
        if found is None:
            found = self._bytes_by_id[token_id] = self._look_up_bytes(token_id)
        return found

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        try:
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
        except KeyError:  # an added token that is written as it is
            return token.encode()

    def _is_shown(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and token not in self._special

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">")


def _byte_of_symbol() -> dict[str, int]:
    """Return the byte of each symbol of byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 up.
    """
    own = {chr(byte): byte for byte in range(NUM_BYTE_SYMBOLS) if chr(byte) in pre_tokenizers.ByteLevel.alphabet()}
    rest = (byte for byte in range(NUM_BYTE_SYMBOLS) if byte not in own.values())
    return own | {chr(NUM_BYTE_SYMBOLS + place): byte for place, byte in enumerate(rest)}


_BYTE_OF_SYMBOL = _byte_of_symbol()


def _bos_id(tokenizer: Tokenizer, card: ModelCard) -> int | None:
    if not card.add_bos:
        return None
    bos_id = tokenizer.token_to_id(card.bos_token)
    if bos_id is None:
        raise ModelUnusable(f"model {card.model} wants BOS first, but its tokenizer has no token {card.bos_token!r}")
    return bos_id


def _decoder_kind(tokenizer: Tokenizer) -> str:
    if tokenizer.decoder is None:
        return ""
    kind: str = json.loads(tokenizer.decoder.__getstate__())["type"]
    return kind
