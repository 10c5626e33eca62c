"""Token ids to text while they arrive; one detokenizer per answer.

Whatever the cut into pushes: the concatenation of all texts equals the tokenizer's `decode(ids,
skip_special_tokens=True)`, and a character that is split over tokens is held back until it is whole.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """State of one answer's text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""

    def finish(self) -> str:
        """Return what was held back; half a character becomes one replacement character."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes (byte-level BPE): a token is looked up once, then it is a table access."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._holding: codecs.IncrementalDecoder | None = None
        """Has the beginning of a character; None: nothing is held back, as nearly always."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        pushed = b"".join(map(self._bytes_of, token_ids))
        if self._holding is None:
            try:
                return pushed.decode()
            except UnicodeDecodeError:
                self._holding = _decoder_of_utf8(errors="replace")
        text = self._holding.decode(pushed)
        if not self._holding.getstate()[0]:
            self._holding = None
        return text

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self._holding is None else self._holding.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a short window twice, with and without the new tokens, and takes the rest.

    The window starts one settled piece back, because decoders treat the first token of a text differently. Text is
    settled when its last token can no longer change it: not a byte of a run of byte tokens, not half a character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        is_shown: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._is_byte = is_byte
        self._window: list[int] = []
        self._num_settled = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        return "".join(self._push_one(token_id) for token_id in token_ids if self._is_shown(token_id))

    def finish(self) -> str:
        """Return what was held back."""
        return self._settle() if self._num_settled < len(self._window) else ""

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        if self._is_byte(token_id) or self._decode(self._window).endswith(REPLACEMENT):
            return ""
        return self._settle()

    def _settle(self) -> str:
        before = self._decode(self._window[: self._num_settled]) if self._num_settled else ""
        text = self._decode(self._window)[len(before) :]
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        return text
