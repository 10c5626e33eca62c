"""The tokenizer of one model, as its workers published it: text to ids, ids to text.

Special tokens inside a text are read as such, like Hugging Face does for chats. BOS is added to plain texts only: a
chat template writes its own.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, partial

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
        self.added_tokens = frozenset(token.content for token in added)
        """What has tokens of its own beside the vocabulary of ordinary text."""
        self._special = frozenset(token.content for token in added if token.special)
        self._has_byte_tokens = _decoder_kind(self._tokenizer) == "ByteLevel"
        self._bytes_by_id = _Table(self._look_up_bytes)
        self._shown_by_id = _Table(self._look_up_shown_bytes)

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a rendered chat template."""
        return self._encode(text, param="messages")

    def encode_text(self, text: str, *, adds_bos: bool = True) -> list[int]:
        """Return the ids of a plain text behind one BOS, if the model wants one; a BOS that is there is not doubled."""
        ids = self._encode(text, param="prompt")
        if not adds_bos or self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]

    def decode(self, token_ids: Sequence[int], *, skips_special: bool = True) -> str:
        """Return the text of these ids, special tokens left out unless they are wanted."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skips_special)

    def text_of(self, token_ids: list[int]) -> str:
        """Return the text of these ids, special tokens shown; unlike `decode` it lets other threads run."""
        text: str = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]
        return text

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary writes each of these ids; one without a token has no name."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, *, skips_special: bool = True, shown: AbstractSet[str] = frozenset()) -> Detokenizer:
        """Return the state for one answer; the special tokens `shown` are never left out."""
        if skips_special and not self._special.isdisjoint(shown):
            return self._showing_detokenizer(shown)
        if self._has_byte_tokens:
            return ByteDetokenizer((self._shown_by_id if skips_special else self._bytes_by_id).__getitem__)
        return WindowDetokenizer(
            partial(self.decode, skips_special=skips_special),
            is_shown=self._is_shown if skips_special else self._is_known,
            is_byte=self._is_byte,
        )

    def _showing_detokenizer(self, shown: AbstractSet[str]) -> Detokenizer:
        ids = {self._tokenizer.token_to_id(token) for token in self._special & shown}

        def is_shown(token_id: int) -> bool:
            return token_id in ids or self._is_shown(token_id)

        if self._has_byte_tokens:
            return ByteDetokenizer(lambda token_id: self.bytes_of(token_id) if is_shown(token_id) else b"")
        return WindowDetokenizer(partial(self.decode, skips_special=False), is_shown=is_shown, is_byte=self._is_byte)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, also those of half a character; a special token's are its name,
        those of an id without a token none."""
        return self._bytes_by_id[token_id]

    def lark_terminal(self, text: str) -> str:
        """Return how a grammar writes `text`: llguidance takes special tokens, and added ones that look like a tag, for
        no text at all; they are named by their id."""
        is_tag = text in self._special or (text in self.added_tokens and text[:1] + text[-1:] == "<>")
        return f"<[{self._tokenizer.token_to_id(text)}]>" if is_tag else json.dumps(text)

    def without_bos(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return a prompt's ids without the BOS that `encode_text` puts in front."""
        return token_ids[1:] if self._bos_id is not None and token_ids[0] == self._bos_id else token_ids

    def _encode(self, text: str, param: str) -> list[int]:
        if len(text) > self._max_chars:
            raise InvalidRequest(
                f"The prompt's {len(text)} characters cannot fit the model's context.",
                param=param,
                code="context_length_exceeded",
            )
        # The batch call, unlike `encode`, releases the GIL: 1.3 MB took 0.5 s, in which other threads ran.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _look_up_shown_bytes(self, token_id: int) -> bytes:
        return self.bytes_of(token_id) if self._is_shown(token_id) else b""

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return token.encode()
        if self._has_byte_tokens:
            return _bytes_of_symbols(token)
        if self._is_byte(token_id):
            return bytes([int(token[3:5], 16)])
        return self._text_behind_another(token_id).encode()

    def _text_behind_another(self, token_id: int) -> str:
        """Return what a token adds to a text: many decoders treat the first token of a text differently."""
        before = self._tokenizer.decode([self._first_word_id])
        return self._tokenizer.decode([self._first_word_id, token_id])[len(before) :]

    @cached_property
    def _first_word_id(self) -> int:
        """An ordinary token that leaves a trace in every text."""
        is_word = (self._is_word(token_id) for token_id in range(self._tokenizer.get_vocab_size()))
        return next((token_id for token_id, is_one in enumerate(is_word) if is_one), 0)

    def _is_word(self, token_id: int) -> bool:
        is_plain = self._is_shown(token_id) and not self._is_byte(token_id)
        return is_plain and self._tokenizer.decode([token_id]).isalnum()

    def _is_known(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def _is_shown(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and token not in self._special

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">")


class _Table(dict[int, bytes]):
    """Bytes by token id, each looked up once: from then on asking for them runs no Python."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._look_up(token_id)
        return found


def _byte_of_symbol() -> dict[str, int]:
    """Return the byte of each symbol of byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 up.
    """
    own = {chr(byte): byte for byte in range(NUM_BYTE_SYMBOLS) if chr(byte) in pre_tokenizers.ByteLevel.alphabet()}
    rest = (byte for byte in range(NUM_BYTE_SYMBOLS) if byte not in own.values())
    return own | {chr(NUM_BYTE_SYMBOLS + place): byte for place, byte in enumerate(rest)}


_BYTE_OF_SYMBOL = _byte_of_symbol()


def _bytes_of_symbols(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
    except KeyError:  # an added token that is written as it is
        return token.encode()


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
